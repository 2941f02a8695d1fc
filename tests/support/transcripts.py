"""Transcripts: what happens to a state machine, as a text file, and the instructions that come out.

A file has comments, inputs, and below each input what comes of it, one instruction a line::

    # The process of worker 1 is killed: the kernel closes its sockets.
    > link of w1 closes
      watch_process w1 address=w1/epoch1

An input is an event: a message (its ``type`` in ``wire``, and fields as in :mod:`support.messagewords`; its
parts stand in lines below that begin with ``>`` and four spaces), a link that closes, time that passes.
Everything that comes out is there, or ``(nothing)``; ``(ignored)``: the coordinator counts it as ignored.
``> after submission`` means all that is in that file. Which methods of the machines the events call stands in
the drivers here alone.

``pytest --rewrite-transcripts`` writes into the files what comes out. (The model: the data-driven tests of
etcd's raft, ``rafttest``.)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, get_args

from minishuffle.config import ClusterSettings
from minishuffle.coordinator.clients.status import CoordinatorFacts
from minishuffle.coordinator.instructions import (
    CoordinatorStep,
    Instruction,
    ReadSnapshot,
    Reply,
    SendToWorker,
    WorkInFolder,
)
from minishuffle.coordinator.jobs.savepoints import FolderWork
from minishuffle.coordinator.journal.codec import unpack_record
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    PartitionLost,
    PeerLost,
    PeerSuspected,
    ResourceExhausted,
    StorageUnavailable,
    UnreadableSnapshot,
)
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import AttemptId, Changes, PartitionId, RecordKey, is_holder
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, StatefulOperator, Vertex
from minishuffle.snapshots.sealedmanifest import SnapshotManifest
from minishuffle.wire import clients, inquiries, outputs, requests  # noqa: F401  (their messages, by type)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import (
    ControlMessage,
    DeployTasks,
    ErrorInfo,
)
from minishuffle.wire.registration import Registered
from minishuffle.wire.reports import AttemptReport, Fact, SnapshotsHeld
from minishuffle.wire.requests import JobEvent
from minishuffle.worker.channels.registry import ChannelKey, Progress
from minishuffle.worker.instructions import KeptState, Report, Send, StartTask, WorkerStep, attempt_id
from minishuffle.worker.state import WorkerState
from support.messagewords import WALL, Words, split_words

__all__ = [
    "FACTS",
    "CoordinatorTranscript",
    "WorkerTranscript",
    "check",
    "played",
    "sent_to_workers",
    "taken_and_given",
    "word_of",
]

NOTHING: Final = "(nothing)"
FACTS: Final[dict[str, Any]] = {kind.model_fields["kind"].default: kind for kind in get_args(Fact)}
"""What is reported of attempts: a worker that sends one of these sends a report of it."""
SILENT: Final = re.compile(r"after .*|settings .*|job .*|the journal cannot be written: .*")
"""Inputs that set the scene."""
Method = Callable[..., list[str]]


@dataclass
class Input:
    text: str
    parts: list[str] = field(default_factory=list)


def inputs_of(text: str) -> list[Input]:
    """The inputs of a file, in order."""
    found: list[Input] = []
    for line in text.splitlines():
        if line.startswith(">    "):
            found[-1].parts.append(line.removeprefix(">").strip())
        elif line.startswith("> "):
            found.append(Input(line.removeprefix("> ").strip()))
    return found


def event(pattern: str) -> Callable[[Method], Method]:
    """An input of that form calls this method, with what stands in the groups."""

    def marked(method: Method) -> Method:
        method.pattern = re.compile(pattern)  # type: ignore[attr-defined]
        return method

    return marked


def word_of(kind: type) -> str:
    """The name of a class as it stands in transcripts."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


class Transcript:
    """Plays the inputs of a file. Subclasses know the machine."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.words = Words()
        self.settings = ClusterSettings()
        self._directory = directory
        self._due: float | None = None
        """When the machine is to be called."""
        self._parts: list[str] = []

    def play(self, each: Input) -> list[str]:
        """Have it happen; gives what comes out."""
        self._parts = each.parts
        for method in self._methods():
            match = method.pattern.fullmatch(each.text)  # type: ignore[attr-defined]
            if match is not None:
                lines = method(**match.groupdict())
                return lines or ([] if SILENT.fullmatch(each.text) else [NOTHING])
        raise AssertionError(f"no event is called {each.text!r}")

    def _methods(self) -> Iterator[Method]:
        for name in dir(type(self)):
            if hasattr(getattr(type(self), name), "pattern"):
                yield getattr(self, name)

    @event(r"after (?P<name>\w+)")
    def _after(self, name: str) -> list[str]:
        for each in inputs_of((self._directory / f"{name}.txt").read_text()):
            self.play(each)
        return []

    @event(r"settings (?P<settings>.+)")
    def _set(self, settings: str) -> list[str]:
        values = dict(each.split("=") for each in settings.split())
        self.settings = ClusterSettings(**{name: float(value) for name, value in values.items()})  # type: ignore[arg-type]
        return []

    @event(r"(?P<seconds>[\d.]+) s pass(, with heartbeats of (?P<beating>.+))?")
    def _pass(self, seconds: str, beating: str | None, **_: str) -> list[str]:
        """Timers fire when they are due, and so do heartbeats."""
        end, lines = self.now + float(seconds), list[str]()
        beat = self.now + self.settings.heartbeat_interval if beating else end + 1.0
        while True:
            due = self._due
            self.now = min(end, beat, end if due is None else max(due, self.now))
            came = self._timer() if due is not None and self.now >= due else []
            if self.now >= beat:
                beat += self.settings.heartbeat_interval
                came += self._beat((beating or "").split())
            lines += [
                f"{self.words.token(self.now + WALL)} {line}" if line[0] != " " else line for line in came
            ]
            if self.now >= end:
                return lines

    def _timer(self) -> list[str]:
        raise NotImplementedError

    def _beat(self, beating: list[str]) -> list[str]:
        raise NotImplementedError

    def message(self, kind: str, tokens: list[str], given: Mapping[str, Any]) -> list[ControlMessage]:
        """What an input says was sent: one message for each subtask that it names, or one."""
        made = FACTS.get(kind) or ControlMessage.by_type[kind]
        is_of_one = "index" in made.model_fields or kind in FACTS
        subtasks = self.words.subtasks(tokens) if is_of_one else []
        rest = [token for token in tokens if not any(token == each[0] for each in subtasks)]
        given = {"term": self.words.term, **given}
        return [
            self.words.made(made, [*([each[0]] if each else []), *rest], given, self._parts)
            for each in subtasks or [None]
        ]


# --- the coordinator ------------------------------------------------------------------------------


@dataclass
class Peer:
    """A worker process or a client: its links, the present one last."""

    name: str
    links: list[int] = field(default_factory=list)
    is_open: bool = False
    worker: int = 0
    epoch: int = 0
    reports: int = 0
    """How many of its reports have numbers: see ``Acknowledge``."""
    deployed: DeployTasks | None = None
    """What was sent to it last."""


class CoordinatorTranscript(Transcript):
    """Coordinator of term 1, at first without records; then what its journal has."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.words.term = 1
        self._journal: dict[RecordKey, bytes] = {}
        self._problem = ""
        """Why the journal cannot be written."""
        self._unwritten: Changes | None = None
        self._machine: CoordinatorState | None = None
        self._peers: dict[str, Peer] = {}
        self._links = self._requests = 0
        self._asked: dict[tuple[int, int], str] = {}
        """The types of requests that were not answered."""
        self._work: FolderWork | None = None
        """What is to be done in the folder of a savepoint."""
        self._manifest: SnapshotManifest | None = None
        self._asked_to_read: ReadSnapshot | None = None
        self._submitted: list[str] = []
        """Names of the operators of the last submission."""

    def play(self, each: Input) -> list[str]:
        """Says so as well if the machine has counted a message as one that it ignores."""
        machine, ignored = self._machine, self.state.ignored if self._machine else 0
        lines = super().play(each)
        if self._machine is not machine or machine is None or self.state.ignored == ignored:
            return lines
        return ["(ignored)", *(line for line in lines if line != NOTHING)]

    @property
    def state(self) -> CoordinatorState:
        if self._machine is None:
            facts = CoordinatorFacts(
                "blue", "1.2.3", "3.13", 4711, self.words.term, WALL, "host", False, "/snapshots"
            )
            self._machine = CoordinatorState(self.settings, facts, self._journal, Random(0).random, self.now)
        return self._machine

    def _timer(self) -> list[str]:
        return self._carry_out(self.state.handle_timer(self.now))

    def _beat(self, beating: list[str]) -> list[str]:
        return [line for name in beating for line in self._send(name, "heartbeat", "")]

    # --- inputs ----------------------------------------------------------------------------------

    @event(r"(?P<name>w\d) sends (?P<kind>\w+)(?P<words>.*)")
    def _send(self, name: str, kind: str, words: str) -> list[str]:
        peer = self._peer(name)
        number = int(name[1:])
        given = {
            "host": f"10.0.0.{number}",
            "seen": f"10.0.0.{number}",
            "data_port": 5000 + number,
            "metrics_port": 6000 + number,
            "pid": 100 + number,
            "slots": 2,
            "python": "3.13",
            "segments": 2048,
            "segment_bytes": 32768,
        }
        if kind != "register":
            given = {"epoch": peer.epoch, "worker": peer.worker} if kind == "heartbeat" else {}
        if kind in FACTS:
            messages: list[ControlMessage] = [*self._reports(peer, kind, split_words(words))]
        else:
            parts, self._parts = self._parts, []
            kept = [split_words(each) for each in parts if each.split()[0] in FACTS]
            reports = [each for words_of in kept for each in self._reports(peer, words_of[0], words_of[1:])]
            self._parts = [each for each in parts if each.split()[0] not in FACTS]
            given |= {"reports": reports} if reports else {}
            messages = self.message(kind, split_words(words), given)
        link = self._link_of(peer)
        return [
            line
            for message in messages
            for line in self._carry_out(self.state.worker_message(link, message, self.now))
        ]

    def _reports(self, peer: Peer, kind: str, tokens: list[str]) -> list[AttemptReport]:
        """A fact of each subtask that is named, in a report with the next number, or with that which is
        named. A worker registers with facts that stand in the lines below."""
        found = list[AttemptReport]()
        numbers = [int(each.removeprefix("number=")) for each in tokens if each.startswith("number=")]
        for fact in self.message(kind, [each for each in tokens if not each.startswith("number=")], {}):
            peer.reports += kind != "task_stands" and not numbers
            number = 0 if kind == "task_stands" else (*numbers, peer.reports)[0]
            found.append(AttemptReport(term=self.words.term, number=number, facts=[fact]))  # type: ignore[list-item]
        return found

    @event(r"(?P<name>client\d?) sends (?P<kind>\w+)(?P<words>.*)")
    def _request(self, name: str, kind: str, words: str) -> list[str]:
        link = self._link_of(self._peer(name))
        tokens = split_words(words)
        if kind == "submit":
            self._parts, parts = [], self._parts
            given = {"graph": self._graph(parts).to_bytes(), "python": "3.13"}
        else:
            given = {}
        (message,) = self.message(kind, tokens, given)
        self._requests += 1
        self._asked[link, self._requests] = kind
        return self._carry_out(self.state.client_request(link, self._requests, message, self.now))

    def _graph(self, lines: list[str]) -> JobGraph:
        """Of lines such as ``vertex read parallelism=2``, ``edge read count hash``, ``settings …``."""
        told = [(kind, split_words(rest)) for kind, _, rest in (line.partition(" ") for line in lines)]
        names = [words[0] for kind, words in told if kind == "vertex"]
        fed = {words[1] for kind, words in told if kind == "edge"}
        vertices, edges, settings = [], [], {}
        for kind, words in told:
            values = {name: value or True for name, _, value in (word.partition("=") for word in words)}
            if kind == "settings":
                settings = values
            elif kind == "edge":
                source, target, partitioner, *_ = words
                values = {name: value for name, value in values.items() if value is not True}
                ends = {"source": names.index(source), "target": names.index(target)}
                edges.append(Edge.model_validate(ends | {"partitioner": partitioner} | values))
            else:
                name = words[0]
                del values[name]
                if values.pop("stateful", None):
                    kind_of = "count" if name in fed else "source"
                    values["states"] = [StatefulOperator(id=name, name=name, kind=kind_of)]
                of = {
                    "name": name,
                    "operators": [name],
                    "is_source": name not in fed,
                    "program": name.encode(),
                }
                vertices.append(Vertex.model_validate(of | {"parallelism": 1} | values))
        self._submitted = names
        return JobGraph(vertices=vertices, edges=edges, settings=JobSettings.model_validate(settings))

    @event(r"the submission (is|cannot be) written")
    def _journaled(self) -> list[str]:
        error = ResourceExhausted(self._problem) if self._problem else None
        return self._carry_out(self.state.journaled(error, self.now))

    @event(r"the journal cannot be written: (?P<why>.+)")
    def _fail(self, why: str) -> list[str]:
        self._problem = why
        return []

    @event(r"the journal can be written again(?P<lost>, and has nothing)?")
    def _write_again(self, lost: str | None) -> list[str]:
        changes = self.state.everything(self.now) if lost else self._unwritten or {}
        self._problem, self._unwritten = "", None
        held = self.state.write_ahead.written()
        return self._carry_out(CoordinatorStep(changes, messages=held, timers=self._due))

    @event(r"link of (?P<name>w\d|client\d?) closes(?P<cause>, for cause)?(: (?P<why>.+))?")
    def _close(self, name: str, cause: str | None, why: str | None) -> list[str]:
        peer = self._peer(name)
        peer.is_open = False
        told = {"why": f"its control link closed ({why})"} if why else {}
        return self._carry_out(
            self.state.link_closed(peer.links[-1], self.now, for_cause=bool(cause), **told)
        )

    @event(r"the process of (?P<name>w\d) is (?P<found>found|gone)")
    def _process(self, name: str, found: str) -> list[str]:
        link = self._peer(name).links[-1]
        verb = self.state.process_found if found == "found" else self.state.process_gone
        return self._carry_out(verb(link, self.now))

    @event(r"the host of look (?P<ticket>\d+) (?P<answer>answers|does not answer) the coordinator")
    def _host(self, ticket: str, answer: str) -> list[str]:
        return self._carry_out(self.state.host_looked(int(ticket), answer == "answers", self.now))

    @event(r"the last deploy to (?P<name>w\d) is too long to be sent")
    def _too_long(self, name: str) -> list[str]:
        peer = self._peer(name)
        assert peer.deployed is not None
        error = ResourceExhausted("the message is too long")
        return self._carry_out(self.state.undeployable(peer.worker, peer.deployed, error, self.now))

    @event(r"the (?:folder|manifest) of the savepoint is there")
    def _ready(self) -> list[str]:
        assert self._work is not None
        return self._carry_out(self.state.folder_ready(self._work, None, self.now))

    @event(r"the (?:folder|manifest) of the savepoint cannot be written: (?P<why>.+)")
    def _not_ready(self, why: str) -> list[str]:
        assert self._work is not None
        return self._carry_out(self.state.folder_ready(self._work, StorageUnavailable(why), self.now))

    @event(r"that savepoint is read")
    def _read(self) -> list[str]:
        """That of the last manifest."""
        assert self._asked_to_read is not None and self._manifest is not None
        return self._carry_out(self.state.snapshot_read(self._asked_to_read.ticket, self._manifest, self.now))

    @event(r"that savepoint cannot be read: (?P<why>.+)")
    def _not_read(self, why: str) -> list[str]:
        assert self._asked_to_read is not None
        found = UnreadableSnapshot(why)
        return self._carry_out(self.state.snapshot_read(self._asked_to_read.ticket, found, self.now))

    @event(r"the coordinator is killed and started again")
    def _restart(self) -> list[str]:
        """All links close; the next one knows what the journal has."""
        for peer in self._peers.values():
            peer.is_open = False
        self._asked.clear()
        self.words.term += 1
        self._machine, self._unwritten = None, None
        return self._timer()

    @event(r"the coordinator hands over to the next one")
    def _hand_over(self) -> list[str]:
        lines = self._carry_out(self.state.hand_over(self.now))
        return [*lines, *self._restart()]

    @event(r"the coordinator is interrupted")
    def _stop(self) -> list[str]:
        return self._carry_out(self.state.stop(self.now))

    @event(r"the wall clock is (?P<seconds>[\d.]+) s ahead")
    def _anchor(self, seconds: str) -> list[str]:
        self._carry_out(self.state.anchor(WALL + float(seconds)))
        return []

    # --- links -----------------------------------------------------------------------------------

    def _peer(self, name: str) -> Peer:
        return self._peers.setdefault(name, Peer(name))

    def _link_of(self, peer: Peer) -> int:
        """Its link; a new one if that is closed."""
        if not peer.is_open:
            self._links += 1
            peer.links.append(self._links)
            peer.is_open = True
        return peer.links[-1]

    def _named(self, link: int) -> str:
        (peer,) = [each for each in self._peers.values() if link in each.links]
        return peer.name if link == peer.links[-1] else f"{peer.name}(link {link})"

    # --- what comes out --------------------------------------------------------------------------

    def _carry_out(self, step: CoordinatorStep) -> list[str]:
        self._due = step.timers
        for each in step.messages:
            if isinstance(each, WorkInFolder):
                self._work, self._manifest = each.work, each.work.manifest or self._manifest
            elif isinstance(each, ReadSnapshot):
                self._asked_to_read = each
        lines = self._write(step)
        if lines and self._problem and not self.state.write_ahead.problem:
            (step,) = self.state.write_ahead.failed([step], self._problem)
        lines += [line for each in step.messages for line in self._lines(each)]
        self.state.validate()
        return lines

    def _write(self, step: CoordinatorStep) -> list[str]:
        """A submission is answered with an event of its own."""
        failed = " (not written)" if self._problem else ""
        lines = [f"journal{failed}: {self._records(step.records)}"] if step.records else []
        for changes in step.submissions:
            (job,) = [name for kind, name in changes if kind == "job"]
            self.words.vertices[job] = self._submitted
            lines.append(f"journal submission{failed}: {self._records(changes)}")
        if not self._problem:
            for changes in (step.records, *step.submissions):
                self._keep(changes)
        elif step.records:
            self._unwritten = (self._unwritten or {}) | step.records
        return lines

    def _keep(self, changes: Changes) -> None:
        for key, record in changes.items():
            if record is None:
                self._journal.pop(key, None)
            else:
                self._journal[key] = record

    def _lines(self, each: Instruction) -> list[str]:
        lines = self.words.lines
        match each:
            case SendToWorker(worker, link, message):
                name = self._named(link)
                peer = self._peers[name.partition("(")[0]]
                if isinstance(message, Registered):
                    peer.worker, peer.epoch = worker, message.epoch
                if isinstance(message, DeployTasks):
                    peer.deployed = message
                return lines(f"{name} <- {message.type}", message)  # type: ignore[attr-defined]
            case Reply(link, request, message):
                asked = self._asked.pop((link, request)) if request else "register"
                return lines(f"{self._named(link)} <- {message.type} (to {asked})", message)  # type: ignore[attr-defined]
        if not hasattr(each, "link"):
            return lines(word_of(type(each)), each)
        named = f"{word_of(type(each))} {self._named(each.link)}"
        return [line.replace(f" link={each.link}", "", 1) for line in lines(named, each)]

    def _records(self, changes: Changes) -> str:
        """Kinds and names; of events what they are. What is taken out has a minus."""
        groups: dict[tuple[str, str], list[str]] = {}
        for (kind, name), record in sorted(changes.items(), key=_natural):
            job, _, rest = name.partition("/")
            if kind in ("task", "positions", "counts", "past"):
                operator, index = map(int, rest.split("/"))
                shown = f"{self.words.vertices[job][operator]}[{index}]"
            elif kind == "event" and record is not None:
                shown = f"{rest} {unpack_record(JobEvent, (kind, name), record).kind}"
            else:
                shown = rest
            sign = "-" if record is None else ""
            groups.setdefault((sign + kind, job), []).append(shown)
        return "; ".join(
            " ".join(filter(None, [kind, f"{job}/" * bool(names[0]) or job])) + ", ".join(names)
            for (kind, job), names in groups.items()
        )


def _natural(item: tuple[RecordKey, Any]) -> list[Any]:
    kind, name = item[0]
    return [kind, *((int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name))]


# --- a worker -------------------------------------------------------------------------------------


class WorkerTranscript(Transcript):
    """Worker 2 in its first registration."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.words.term = 1
        self._machine: WorkerState | None = None
        self._progress: dict[AttemptId, Progress] = {}

    @property
    def state(self) -> WorkerState:
        if self._machine is None:
            self._machine = WorkerState(
                self.settings,
                2,
                epoch=2,
                term=self.words.term,
                progress=lambda key: self._progress.get(key, (0.0, 0, 0)),
            )
        return self._machine

    def _progress_of(self, key: AttemptId) -> Progress:
        return self._progress.get(key, (0.0, 0, 0))

    def _timer(self) -> list[str]:
        return self._shown(self.state.handle_timer(self.now))

    def _beat(self, beating: list[str]) -> list[str]:
        raise AssertionError("a worker's heartbeats are made by its shell")

    def _shown(self, step: WorkerStep) -> list[str]:
        self.state.validate()
        self._due = step.timers
        self.words.term = self.state.term
        lines = list[str]()
        for each in step.messages:
            if isinstance(each, Report):
                lines += self.words.lines(f"coordinator <- {each.fact.kind}", each.fact)
            elif isinstance(each, Send):
                lines += self.words.lines(f"coordinator <- {each.message.type}", each.message)  # type: ignore[attr-defined]
            elif isinstance(each, StartTask):  # The rest is what was deployed.
                attempt = attempt_id(each.message.job, each.spec)
                programs = ",".join(each.decode() for each in each.message.programs.values())
                lines.append(f"start_task {self.words.token(attempt)} programs={programs}")
            else:
                lines += self.words.lines(word_of(type(each)), each)
        return lines

    # --- inputs ----------------------------------------------------------------------------------

    @event(r"job (?P<job>\w+) (?P<names>.+)")
    def _job(self, job: str, names: str) -> list[str]:
        """The names of its operators."""
        self.words.vertices[job] = names.split()
        return []

    @event(r"coordinator sends (?P<kind>\w+)(?P<words>.*)")
    def _told(self, kind: str, words: str) -> list[str]:
        lines = []
        for message in self.message(kind, split_words(words), {"name": "words"}):
            if isinstance(message, DeployTasks):
                settings = JobSettings().model_dump() | message.settings
                message = message.model_copy(update={"settings": settings})
            lines += self._shown(self.state.handle(message, self.now))
        return lines

    @event(r"(?P<task>\S+) (?P<what>runs|finishes|fails|stops|passes its first batch on)(: (?P<why>.+))?")
    def _task(self, task: str, what: str, why: str | None) -> list[str]:
        key = self.words.attempt(task)
        if what == "runs":
            return self._shown(self.state.task_running(key))
        if what == "passes its first batch on":
            self._shown(self.state.recovered(key, "first record", self.now))
            return []
        state = {"finishes": "finished", "fails": "failed", "stops": "canceled"}[what]
        error = ErrorInfo(code=60, text=why) if why else None
        if is_holder(key.subtask.operator):
            assert what == "fails" and error is not None
            return self._shown(self.state.snapshots_held(SnapshotsHeld(attempt=key, problem=error.text)))
        return self._shown(self.state.task_ended(key, state, error, b"", TaskCounters()))

    @event(r"(?P<task>\S+) stops at the barrier of its move(, with (?P<kept>\d+) bytes of state)?")
    def _moved(self, task: str, kept: str | None) -> list[str]:
        key, state = self.words.attempt(task), KeptState(True, int(kept or 0))
        return self._shown(self.state.task_ended(key, "canceled", None, b"", TaskCounters(), state=state))

    @event(r"(?P<task>\S+) runs without the state kept for it: (?P<why>.+)")
    def _runs_without(self, task: str, why: str) -> list[str]:
        return self._shown(self.state.task_running(self.words.attempt(task), state_lost=why))

    @event(r"what (?P<task>\S+) has stored cannot be read: (?P<why>.+)")
    def _lose(self, task: str, why: str) -> list[str]:
        return self._shown(self.state.partition_lost(self.words.attempt(task), PartitionLost(why)))

    @event(r"(?P<task>\S+) (?P<what>waits|goes on)")
    def _at(self, task: str, what: str) -> list[str]:
        """What the shell sees when it looks at a task that is not in one and the same call."""
        key = self.words.attempt(task)
        seconds, *_ = self._progress.get(key) or (0.0,)
        self._progress[key] = None if what == "waits" else (seconds + 1.0, 0, 0)
        return []

    CHANNEL: ClassVar = {
        "is attached": ChannelEvent.ATTACH,
        "has ended": ChannelEvent.END,
        "has failed": ChannelEvent.FAIL,
        "is drained": ChannelEvent.DRAIN,
    }

    @event(
        r"channel (?P<name>edge\d+\.\d+->\S+?)(, generation (?P<generation>\d+))? "
        r"(?P<what>is attached|has ended|has failed|is drained)"
    )
    def _channel(self, name: str, generation: str | None, what: str) -> list[str]:
        edge, producer, task = re.fullmatch(r"edge(\d+)\.(\d+)->(\S+)", name).groups()  # type: ignore[union-attr]
        key = ChannelKey(self.words.attempt(task), int(edge), int(producer))
        number = int(generation) if generation else self.state.channels.inputs[key].request.generation
        return self._shown(self.state.channel_event(key, number, self.CHANNEL[what], self.now))

    @event(r"link to w(?P<worker>\d) is (?P<what>up|down|suspected)(: (?P<why>.+))?")
    def _link(self, worker: str, what: str, why: str | None) -> list[str]:
        number = int(worker)
        if what == "up":
            return self._shown(self.state.peer_up(number, self.now))
        error = (PeerSuspected if what == "suspected" else PeerLost)(why or "the link broke")
        return self._shown(self.state.peer_down(number, error, self.now))

    @event(r"dialing w(?P<worker>\d) fails: (?P<why>.+)")
    def _undialed(self, worker: str, why: str) -> list[str]:
        address = self.state.channels.peers.address(int(worker))
        return self._shown(self.state.dial_failed(address, PeerLost(why), self.now))

    @event(
        r"w(?P<worker>\d) requests (?P<partition>edge\d+\.\d+#\d+) "
        r"for (?P<consumer>\d+)#(?P<attempt>\d+)(?P<words>.*)"
    )
    def _requested(self, worker: str, partition: str, consumer: str, attempt: str, words: str) -> list[str]:
        edge, producer, number = map(int, re.findall(r"\d+", partition))
        told = dict(word.split("=") for word in words.split())
        job = told.pop("job", "j1")
        fields = {name: int(value) for name, value in told.items()}
        request = PartitionRequest(
            PartitionId(job, edge, producer),  # type: ignore[arg-type]
            int(consumer),
            number,
            int(attempt),
            **fields,
        )
        return self._shown(self.state.partition_requested(int(worker), request, self.now))

    @event(r"w(?P<worker>\d) takes its request for channel (?P<channel>\d+) back")
    def _taken_back(self, worker: str, channel: str) -> list[str]:
        return self._shown(self.state.partition_cancelled(int(worker), int(channel)))

    @event(r"the process is sent SIGTERM")
    def _leave(self) -> list[str]:
        return self._shown(self.state.leave(self.now))


# --- files ----------------------------------------------------------------------------------------


def played(path: Path, machine: Callable[[Path], Transcript]) -> str:
    """The file, with what comes out now."""
    transcript, lines = machine(path.parent), list[str]()
    inputs = iter(inputs_of(path.read_text()))
    source = [line for line in path.read_text().splitlines() if not line.startswith("  ")]
    for number, line in enumerate(source):
        lines.append(line)
        is_input = line.startswith(">")
        if is_input and not (number + 1 < len(source) and source[number + 1].startswith(">    ")):
            lines += [f"  {each}" for each in transcript.play(next(inputs))]
    return "\n".join(lines) + "\n"


def check(path: Path, machine: Callable[[Path], Transcript], *, rewrites: bool) -> None:
    """What comes out is what the file says; or the file says so from now on."""
    before, after = path.read_text(), played(path, machine)
    if rewrites:
        path.write_text(after)
        return
    names = f"{path.name} as it is", f"{path.name} as it comes out"
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="")
    assert before == after, "\n" + "\n".join(diff)


def _text_of(directory: Path) -> str:
    return "\n".join(path.read_text() for path in directory.glob("*.txt"))


def sent_to_workers(directory: Path) -> set[str]:
    """The types of messages that a coordinator sends to workers in these transcripts."""
    return set(re.findall(r"^  (?:\+\S+ )?w\d(?:\(link \d+\))? <- (\w+)", _text_of(directory), re.MULTILINE))


def taken_and_given(directory: Path) -> tuple[set[str], set[str]]:
    """The types of messages that the machine takes in these transcripts, and the types of messages that it
    sends, with the names of its other instructions."""
    text = _text_of(directory)
    taken = re.findall(r"^> \S+ sends (\w+)", text, re.MULTILINE)
    given = re.findall(r"^  (?:\+\S+ )?(?:\S+ <- )?(\w+)", text, re.MULTILINE)
    return set(taken), set(given)
