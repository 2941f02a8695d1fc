"""A coordinator's state machine with fake workers and clients around it, all in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from minishuffle.config import ClusterSettings
from minishuffle.coordinator.clients.status import CoordinatorFacts
from minishuffle.coordinator.instructions import (
    CloseLink,
    CoordinatorStep,
    Instruction,
    LookForHost,
    Reply,
    SendToWorker,
    Stopped,
    WatchProcess,
)
from minishuffle.coordinator.journal.journalrecords import job_records, recalled_jobs
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.errors import ShuffleError
from minishuffle.ids import AttemptId, Changes, RecordKey, holder_operator
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.clients import BeginWrite, WriteBegun
from minishuffle.wire.messages import (
    CancelTasks,
    ControlMessage,
    DeployTasks,
    DivideTasks,
    ErrorInfo,
    Heartbeat,
    HostLook,
    LogLines,
    PauseTasks,
    PrepareJob,
    ReleaseJob,
    Standing,
    TaskReport,
    TaskSpec,
    WorkerAddress,
    WorkerReport,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import (
    AttemptReport,
    Collected,
    Fact,
    PartitionReadable,
    SnapshotsHeld,
    TaskStands,
    TaskStateChanged,
)
from minishuffle.wire.requests import Accepted, Failure, GetStatus, JobInfo, ShowJob, SubmitJob

TERM = 7
WALL = 1_000_000.0
CLIENT = 1_000
"""Link number of the client."""
OF_JOBS = ("graph", "job", "task", "positions", "past", "event", "file")
"""Kinds of records."""


@dataclass
class FakeWorker:
    """One registration: what it was sent, and the tasks that it would run."""

    link: int
    about: Register
    worker: int = 0
    epoch: int = 0
    inbox: list[ControlMessage] = field(default_factory=list)
    tasks: dict[tuple[str, int, int], TaskSpec] = field(default_factory=dict)
    canceled: set[str] = field(default_factory=set)
    canceled_attempts: set[tuple[str, int, int, int]] = field(default_factory=set)
    prepared: dict[str, dict[int, bytes]] = field(default_factory=dict)
    barriers: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """By job, the last barrier that it has heard of, and whether that is over."""
    states: set[tuple[str, int, int, int]] = field(default_factory=set)
    """Attempts whose state it keeps for the next ones."""
    holders: set[tuple[str, int, int, int]] = field(default_factory=set)
    """Its holders of snapshots, as attempts."""

    def receive(self, message: ControlMessage) -> None:
        self.inbox.append(message)
        match message:
            case Registered():
                self.worker, self.epoch = message.worker, message.epoch
                for each in message.desired:
                    self.receive(each)
            case PrepareJob(job=job, programs=programs):
                self.prepared |= {job: programs} if programs else {}
            case PauseTasks(job=job, barrier=barrier, paused=paused):
                self.barriers[job] = max((barrier, not paused), self.barriers.get(job, (0, True)))
            case DeployTasks():
                told = (message.barrier, not message.paused)
                self.barriers[message.job] = max(told, self.barriers.get(message.job, (0, True)))
                programs = message.programs or self.prepared.get(message.job, {})
                for task in message.tasks:
                    assert task.operator in programs, "a task without its program"
                    self.tasks[message.job, task.operator, task.index] = task
                for each in message.holders:
                    named = (message.job, holder_operator(each.operator), each.index, each.attempt)
                    assert named not in self.holders, "a holder is deployed twice"
                    assert each.task_worker in {address.worker for address in message.workers}
                    self.holders.add(named)
            case CancelTasks(job=job, attempts=[]):
                self.canceled.add(job)
            case CancelTasks(job=job, attempts=attempts):
                named = {(job, each.operator, each.index, each.attempt) for each in attempts}
                known = {(*key, task.attempt) for key, task in self.tasks.items()}
                assert named <= known, "an attempt is cancelled that was not deployed"
                self.canceled_attempts |= named
            case ReleaseJob(job=job, attempts=attempts):
                if not attempts:
                    self.prepared.pop(job, None)
                    self.barriers.pop(job, None)
                named = {(job, each.operator, each.index, each.attempt) for each in attempts}
                self.states, self.holders = (
                    {each for each in kept if each[0] != job or (named and each not in named)}
                    for kept in (self.states, self.holders)
                )
                self.tasks = {
                    key: task
                    for key, task in self.tasks.items()
                    if key[0] != job or (named and (*key, task.attempt) not in named)
                }

    def is_canceled(self, key: tuple[str, int, int], attempt: int) -> bool:
        return key[0] in self.canceled or (*key, attempt) in self.canceled_attempts

    def barrier(self, job: str) -> int:
        """That behind which tasks of the job are to stand; 0: they run."""
        number, over = self.barriers.get(job, (0, True))
        return 0 if over else number

    def got(self, kind: type[ControlMessage]) -> list[Any]:
        return [message for message in self.inbox if isinstance(message, kind)]


class FakeCluster:
    """Carries steps out and checks the invariants after each."""

    def __init__(self, settings: ClusterSettings, records: dict[RecordKey, bytes] | None = None) -> None:
        self.settings = settings
        self.now = 100.0
        self.term = TERM
        self.journal: dict[RecordKey, bytes] = dict(records or {})
        self.state = self._recalled()
        self.workers: dict[int, FakeWorker] = {}
        """By link; one that is taken out hears and says nothing any more."""
        self.sent: list[tuple[int, ControlMessage]] = []
        """Everything that was sent to a worker, by link, whether somebody reads it or not."""
        self.sent_by: list[int] = []
        """The number of the decision that each of these belongs to."""
        self.decisions = 0
        self.replies: dict[tuple[int, int], ControlMessage] = {}
        self.closed: dict[int, str] = {}
        self.watched: dict[int, WorkerAddress] = {}
        """Where a process is looked for, by the link that closed."""
        self.looks: list[HostLook] = []
        """At hosts, by the coordinator itself."""
        self.journal_error: ShuffleError | None = None
        """What writing the journal fails with."""
        self.unwritten: Changes | None = None
        """What could not be written."""
        self.timers: float | None = None
        """When the machine is to be called."""
        self.stopped = False
        self.takes = True
        """Tasks that are to move say at once that all was taken."""
        self.writes_begin = True
        """Workers say at once that a write into a stream has begun."""
        self._numbers = 0

    def _recalled(self, *, workers_anew: bool = False) -> CoordinatorState:
        given: dict[str, Any] = {"workers_anew": workers_anew, "snapshot_dir": self.settings.snapshot_dir}
        facts = CoordinatorFacts("test", "0", "3.11", 99, self.term, WALL, **given)
        return CoordinatorState(self.settings, facts, self.journal, Random(0).random, self.now)

    def lose_coordinator(self, *, workers_anew: bool = False) -> None:
        """It is killed, and started again from its journal; every link is closed."""
        self.term += 1
        self.unwritten = None
        self.state = self._recalled(workers_anew=workers_anew)
        self.workers.clear()
        self.do(self.state.handle_timer(self.now))

    def hand_over(self) -> None:
        """It ends without an end of the cluster, and the next one starts."""
        self.do(self.state.hand_over(self.now))
        self.lose_coordinator()

    def come_back(
        self, worker: FakeWorker, reports: Sequence[AttemptReport] = (), *, hears: bool = True
    ) -> None:
        """A worker registers again, with what it runs, and with ``reports`` that were not acknowledged. It
        ``hears`` the answer, or its link breaks before that."""
        term = next((each.term for each in reversed(worker.got(Registered))), self.term)
        worker.link = self.number()
        if hears:
            self.workers[worker.link] = worker
        held = [
            AttemptId.of(job, operator, index, task.attempt)
            for (job, operator, index), task in worker.tasks.items()
        ]
        kept = sorted(worker.states | worker.holders)
        held = list(dict.fromkeys([*held, *(AttemptId.of(*each) for each in kept)]))
        fields = {"requested_worker": worker.worker, "epoch": worker.epoch, "attempts": held}
        fields["jobs"] = sorted({*worker.prepared, *(job for job, _, _ in worker.tasks)})
        fields["prepared"] = sorted(worker.prepared)
        about = worker.about.model_copy(update=fields | {"term": term, "reports": [*reports]})
        self.do(self.state.worker_message(worker.link, about, self.now))

    def jobs_journaled(self) -> list[str]:
        return [name for kind, name in self.journal if kind == "job"]

    def check_journal(self) -> None:
        """The journal holds what is to be remembered, and that is what is recalled from it."""
        held = {key: record for key, record in self.journal.items() if key[0] in OF_JOBS}
        for jobs in (self.state._jobs.values(), recalled_jobs(self.journal, Random(0).random)):
            wanted = {}
            for job in jobs:
                wanted |= {key: record for key, record in job_records(job).items() if record is not None}
            assert held == wanted

    def do(self, step: CoordinatorStep) -> None:
        self.decisions += 1
        decision, self.timers = self.decisions, step.timers
        for each in self._write(step):
            match each:
                case SendToWorker(_, link, message):
                    self.sent.append((link, message))
                    self.sent_by.append(decision)
                    if link in self.workers:
                        self.workers[link].receive(message)
                        for each in message.desired if isinstance(message, Registered) else [message]:
                            if isinstance(each, BeginWrite) and self.writes_begin:
                                answer = WriteBegun(term=self.term, ticket=each.ticket)
                                self.send(self.workers[link], answer)
                        if isinstance(message, DivideTasks) and self.takes:
                            self._take_all(self.workers[link], message)
                case Reply(link, request, message):
                    assert (link, request) not in self.replies, "answered twice"
                    self.replies[link, request] = message
                case CloseLink(link, why):
                    self.closed[link] = why
                case LookForHost(look):
                    self.looks.append(look)
                case WatchProcess(link, address):
                    self.watched[link] = address
                case Stopped():
                    self.stopped = True
        for _ in step.submissions:
            self.do(self.state.journaled(self.journal_error, self.now))
        self.state.validate()

    def write_again(self) -> None:
        """Try to write what could not be written."""
        self.do(CoordinatorStep(self.unwritten or {}, timers=self.timers))

    def _write(self, step: CoordinatorStep) -> list[Instruction]:
        """Gives what is carried out then."""
        if not (step.records or step.submissions):
            return list(step.messages)
        failed_before, wanted = self.unwritten is not None, (self.unwritten or {}) | step.records
        if self.journal_error is not None:
            self.unwritten = wanted
            (step,) = self.state.write_ahead.failed([step], str(self.journal_error))
            return list(step.messages)
        for changes in (wanted, *step.submissions):
            self.journal |= {key: each for key, each in changes.items() if each is not None}
            for gone in [key for key, each in changes.items() if each is None]:
                self.journal.pop(gone, None)
        self.unwritten = None
        return [*step.messages, *(self.state.write_ahead.written() if failed_before else ())]

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- workers ---------------------------------------------------------------------------------

    def add(self, **fields: Any) -> FakeWorker:
        link = self.number()
        about = Register(
            **{
                "host": "10.0.0.1",
                "data_port": 5000 + link,
                "metrics_port": 6000 + link,
                "pid": 40 + link,
                "slots": 2,
                "python": "3.11",
                "segments": 2048,
                "segment_bytes": 32768,
                **fields,
            }
        )
        worker = FakeWorker(link, about)
        self.workers[link] = worker
        self.do(self.state.worker_message(link, about, self.now))
        return worker

    def send(self, worker: FakeWorker, message: ControlMessage) -> None:
        self.do(self.state.worker_message(worker.link, message, self.now))

    def fact(self, worker: FakeWorker, fact: Fact, number: int = 0, *, term: int | None = None) -> None:
        """A report with nothing else in it."""
        self.send(worker, AttemptReport(term=term or self.term, number=number, facts=[fact]))

    def lose(self, worker: FakeWorker) -> None:
        """Its process is killed: the link closes, and its port refuses connections."""
        self.do(self.state.link_closed(worker.link, self.now))
        if self.watched.pop(worker.link, None) is not None:
            self.do(self.state.process_gone(worker.link, self.now))

    def break_link(self, worker: FakeWorker) -> None:
        """Its control link breaks; whether its process is there nobody knows so far."""
        self.do(self.state.link_closed(worker.link, self.now, "its control link closed (reset)"))
        del self.workers[worker.link]

    def heartbeat(
        self,
        sender: FakeWorker,
        tasks: list[TaskReport] | None = None,
        loaded: int = 0,
        stuck: dict[str, list[int]] | None = None,
        memory_bytes: int = 0,
        retains_much: bool = False,
        disk_problem: str = "",
        **fields: Any,
    ) -> None:
        values = {"term": self.term, "worker": sender.worker, "epoch": sender.epoch, "peers": [], **fields}
        report = WorkerReport(
            jobs_loaded=loaded,
            stuck=stuck or {},
            memory_bytes=memory_bytes,
            retains_much=retains_much,
            disk_problem=disk_problem,
        )
        self.send(sender, Heartbeat(report=report, tasks=tasks or [], **values))

    def report(self, worker: FakeWorker, key: tuple[str, int, int], state: str, **fields: Any) -> None:
        """A task changed its state."""
        report = {name: fields.pop(name) for name in ("number", "term") if name in fields}
        attempt = AttemptId.of(*key, fields.pop("attempt", 1))
        if fields.get("state_bytes") and key in worker.tasks:
            worker.states.add((*key, attempt.attempt))
        self.fact(worker, TaskStateChanged(attempt=attempt, state=state, **fields), **report)  # type: ignore[arg-type]

    def readable(self, worker: FakeWorker, key: tuple[str, int, int], edge: int) -> None:
        """A task has begun the first buffer of an edge, if that is to be announced."""
        spec = worker.tasks[key]
        if any(output.edge == edge and output.announced for output in spec.outputs):
            attempt = AttemptId.of(*key, spec.attempt)
            self.fact(worker, PartitionReadable(attempt=attempt, edge=edge))

    def hold(self, worker: FakeWorker, problem: str = "", *, readable: bool = False) -> None:
        """All its holders of snapshots say that they have all; or that they can hold no more."""
        for each in sorted(worker.holders):
            fact = SnapshotsHeld(attempt=AttemptId.of(*each), problem=problem, readable=readable)
            self.fact(worker, fact)

    def stand(self, worker: FakeWorker, key: tuple[str, int, int], **standing: Any) -> None:
        """A task stands behind the barrier of its job, or as it is given."""
        given = Standing(**{"barrier": worker.barrier(key[0]), **standing})
        attempt = AttemptId.of(*key, worker.tasks[key].attempt)
        self.fact(worker, TaskStands(attempt=attempt, standing=given))

    def _take_all(self, worker: FakeWorker, message: DivideTasks) -> None:
        """Those of the tasks that are to move which are there say that all was taken."""
        for each in message.moving:
            key = (message.job, each.operator, each.index)
            if key in worker.tasks and worker.tasks[key].attempt == each.attempt:
                self.stand(worker, key, barrier=message.barrier, taken=True)

    def stand_all(self, job: str) -> None:
        """Every task that has heard of a barrier."""
        for worker in list(self.workers.values()):
            for key in [key for key in worker.tasks if key[0] == job and worker.barrier(job)]:
                self.stand(worker, key)

    def report_all(self, job: str, state: str, **fields: Any) -> None:
        for worker in list(self.workers.values()):
            for key in [key for key in worker.tasks if key[0] == job]:
                self.report(worker, key, state, **fields)

    def fail(self, worker: FakeWorker, key: tuple[str, int, int], code: int, text: str) -> None:
        self.report(worker, key, "failed", error=ErrorInfo(code=code, text=text))

    def collect(self, worker: FakeWorker, key: tuple[str, int, int], payload: bytes, **fields: Any) -> None:
        report = {name: fields.pop(name) for name in ("number", "term") if name in fields}
        attempt = AttemptId.of(*key, fields.pop("attempt", 1))
        self.fact(worker, Collected(attempt=attempt, payload=payload, **fields), **report)

    def log(self, worker: FakeWorker, job: str, *lines: str) -> None:
        self.send(worker, LogLines(term=self.term, job=job, lines=list(lines)))

    def advance(self, seconds: float, heartbeats: bool = True) -> None:
        """Let time pass in steps of a heartbeat; every timer fires when it is due."""
        end = self.now + seconds
        beat = self.now + self.settings.heartbeat_interval
        while True:
            due = self.timers
            self.now = min(end, beat, max(self.now, due) if due is not None else end)
            if due is not None and self.now >= due:
                self.do(self.state.handle_timer(self.now))
            if self.now >= beat:
                beat += self.settings.heartbeat_interval
                for worker in list(self.workers.values()):
                    if heartbeats and worker.worker:
                        self.heartbeat(worker)
            if self.now >= end:
                return

    # --- clients ---------------------------------------------------------------------------------

    def ask(self, message: ControlMessage, link: int = CLIENT) -> int:
        """Send a request and give its number; the reply may come later."""
        request = self.number()
        self.do(self.state.client_request(link, request, message, self.now))
        return request

    def reply(self, request: int, link: int = CLIENT) -> Any:
        return self.replies.get((link, request))

    def request(self, message: ControlMessage) -> Any:
        """The reply, which has to come at once."""
        return self.replies[CLIENT, self.ask(message)]

    def refusal(self, message: ControlMessage) -> tuple[int, str]:
        """The code and the text with which a request fails."""
        reply = self.request(message)
        assert isinstance(reply, Failure), reply
        return reply.code, reply.text

    def submit(self, graph: JobGraph, name: str = "count words") -> str:
        accepted = self.request(SubmitJob(name=name, python="3.11", graph=graph.to_bytes()))
        assert isinstance(accepted, Accepted), accepted
        return accepted.job

    def show(self, job: str) -> JobInfo:
        info = self.request(ShowJob(job=job))
        assert isinstance(info, JobInfo), info
        return info

    def free_slots(self) -> list[int]:
        return [worker.slots_free for worker in self.request(GetStatus()).workers]


def two_stage_graph(sources: int = 2, sinks: int = 2, partitioner: Any = "hash", **settings: Any) -> JobGraph:
    """Source operator 0, sink operator 1; a failure fails the job unless a restart strategy is given."""
    vertices = [
        Vertex(
            name=name, parallelism=count, operators=[name], is_source=name == "read", program=name.encode()
        )
        for name, count in (("read", sources), ("count", sinks))
    ]
    values = JobSettings(restart_strategy="none").model_dump() | settings
    edges = [Edge(source=0, target=1, partitioner=partitioner)]
    return JobGraph(vertices=vertices, edges=edges, settings=JobSettings.model_validate(values))


@pytest.fixture
def make_graph() -> Callable[..., JobGraph]:
    return two_stage_graph


@pytest.fixture
def make_cluster() -> Callable[..., FakeCluster]:
    def make(records: dict[RecordKey, bytes] | None = None, **settings: Any) -> FakeCluster:
        return FakeCluster(ClusterSettings(**settings), records)

    return make


@pytest.fixture
def cluster(make_cluster: Callable[..., FakeCluster]) -> FakeCluster:
    return make_cluster()


@pytest.fixture
def pair(cluster: FakeCluster) -> tuple[FakeWorker, FakeWorker]:
    """Two workers; a job of parallelism 2 has subtasks 0 on the first, 1 on the second."""
    return cluster.add(), cluster.add()


@pytest.fixture
def job(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], make_graph: Callable[..., JobGraph]
) -> str:
    """A job that runs on both, and whose tasks restart by themselves."""
    job = cluster.submit(make_graph(restart_strategy="individual"))
    cluster.report_all(job, "running")
    return job
