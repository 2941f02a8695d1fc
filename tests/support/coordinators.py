"""A coordinator's own state machine as what its web server reads, without workers and links of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from minishuffle.config import ClusterSettings
from minishuffle.coordinator.clients.status import CoordinatorFacts
from minishuffle.coordinator.instructions import CoordinatorStep, Reply, SendToWorker
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.coordinator.workers import Worker
from minishuffle.counters import CoordinatorSnapshot, TaskCounters
from minishuffle.errors import error_from_code
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, Vertex
from minishuffle.wire.inquiries import ProfiledTask, TappedEdge, TaskProfile, WorkerAnswered, WorkerAsked
from minishuffle.wire.messages import (
    ControlMessage,
    DeployTasks,
    Heartbeat,
    LogLines,
    TaskReport,
    TaskSpec,
    WorkerReport,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import AttemptReport, TaskStateChanged
from minishuffle.wire.requests import Accepted, Failure, SubmitJob

TERM = 3
WALL = 1_700_000_000.0
"""The wall clock when the other one is at 0."""
WORKER_LINK = 1


def two_vertices(parallelism: int = 1) -> JobGraph:
    """A source and a count, with a hash exchange between them."""
    vertices = [
        Vertex(
            name=name,
            parallelism=parallelism,
            operators=[name],
            is_source=name == "read",
            bounded=False,
            program=b"program",
        )
        for name in ("read", "count")
    ]
    return JobGraph(vertices=vertices, edges=[Edge(source=0, target=1, partitioner="hash")])


@dataclass
class ScriptedCoordinator:
    """One worker is registered, whose tasks do what the test says."""

    slots: int = 4
    metrics_port: int = 9
    now: float = 100.0
    tasks: dict[tuple[str, int, int], TaskSpec] = field(default_factory=dict)
    """What the worker was sent, by job, operator and index."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """What its tasks write between two questions of a tap."""
    taps: set[str] = field(default_factory=set)
    """Those that are open on the worker."""
    profiles: list[str] = field(default_factory=list)
    """Questions of profiles: each has ended when it is asked for again."""
    tapped: int = 0
    """Questions of taps."""

    def __post_init__(self) -> None:
        facts = CoordinatorFacts("blue", "1.2.3", "3.13", 4711, TERM, WALL)
        self.epoch = 0
        self._reply: ControlMessage | None = None
        self.state = CoordinatorState(ClusterSettings(), facts, {}, Random(0).random, self.now)
        register = Register(
            host="127.0.0.1",
            data_port=1,
            metrics_port=self.metrics_port,
            pid=1,
            slots=self.slots,
            python="3.13",
            segments=1 << 20,
            segment_bytes=32768,
        )
        self._carry_out(self.state.worker_message(WORKER_LINK, register, self.now))

    def _carry_out(self, step: CoordinatorStep) -> None:
        for _ in step.submissions:
            self._carry_out(self.state.journaled(None, self.now))
        for each in step.messages:
            match each:
                case Reply(message=message):
                    self._reply = message
                case SendToWorker(message=Registered(epoch=epoch)):
                    self.epoch = epoch
                case SendToWorker(message=WorkerAsked(profile=ProfiledTask(profile=name), ticket=ticket)):
                    self.profiles.append(name)
                    state = "ended" if self.profiles.count(name) > 1 else "sampling"
                    found = TaskProfile(state=state, seconds=0.1).model_dump_json()
                    answered = WorkerAnswered(term=TERM, ticket=ticket, answer=found.encode())
                    self._carry_out(self.state.worker_message(WORKER_LINK, answered, self.now))
                case SendToWorker(message=WorkerAsked(ticket=ticket, job=job, tap=tap)):
                    found = {"of": job} if tap is None else {"rows": self._rows(tap), "producers": 1}
                    answered = WorkerAnswered(term=TERM, ticket=ticket, answer=json.dumps(found).encode())
                    self._carry_out(self.state.worker_message(WORKER_LINK, answered, self.now))
                case SendToWorker(message=DeployTasks(job=job, tasks=tasks)):
                    self.tasks.update({(job, task.operator, task.index): task for task in tasks})
                case _:
                    pass  # Nobody hears it.

    def _rows(self, tap: TappedEdge) -> list[dict[str, Any]]:
        """What crosses an edge between two questions."""
        self.tapped += 1
        self.taps = self.taps - {tap.tap} if tap.ends else self.taps | {tap.tap}
        return self.rows

    # --- what the web server reads ---------------------------------------------------------------

    @property
    def clock(self) -> float:
        return self.now + WALL

    @property
    def journal_writable(self) -> bool:
        return not self.state.write_ahead.problem

    def snapshot(self) -> CoordinatorSnapshot:
        return self.state.snapshot(self.now, {})

    def look(self) -> tuple[list[Job], list[Worker]]:
        return self.state.look()

    async def ask(self, request: ControlMessage) -> ControlMessage:
        """Long polls are answered at once."""
        return self.request(
            request.model_copy(
                update={"wait_seconds": 0.0} if "wait_seconds" in type(request).model_fields else {}
            )
        )

    # --- what happens ----------------------------------------------------------------------------

    def request(self, request: ControlMessage) -> ControlMessage:
        """What a client would be replied at once."""
        self._reply = None
        self._carry_out(self.state.client_request(0, 1, request, self.now))
        assert self._reply is not None
        if isinstance(self._reply, Failure):
            raise error_from_code(self._reply.code, self._reply.text)
        return self._reply

    def submit(self, name: str = "words", parallelism: int = 1, *, starts: bool = True) -> str:
        """A job whose tasks run, if it starts."""
        graph = two_vertices(parallelism).to_bytes()
        reply = self.request(SubmitJob(name=name, python="3.13", graph=graph))
        assert isinstance(reply, Accepted)
        for job, operator, index in list(self.tasks):
            if job == reply.job and starts:
                self.report(job, operator, index, "running")
        return reply.job

    def report(self, job: str, operator: int, index: int, state: str) -> None:
        """The worker says that the present attempt of a task has come to that state."""
        attempt = AttemptId.of(job, operator, index, self.tasks[job, operator, index].attempt)
        changed = TaskStateChanged.model_validate({"attempt": attempt, "state": state})
        message = AttemptReport(term=TERM, facts=[changed])
        self._carry_out(self.state.worker_message(WORKER_LINK, message, self.now))

    def log(self, job: str, lines: list[str]) -> None:
        """The worker says that the job has logged these."""
        message = LogLines(term=TERM, job=job, lines=lines)
        self._carry_out(self.state.worker_message(WORKER_LINK, message, self.now))

    def heartbeat(
        self, counters: dict[tuple[str, int, int], TaskCounters], report: WorkerReport | None = None
    ) -> None:
        """The worker says what these tasks have counted."""
        tasks = [
            TaskReport(
                attempt=AttemptId.of(job, operator, index, self.tasks[job, operator, index].attempt),
                counters=each,
            )
            for (job, operator, index), each in counters.items()
        ]
        message = Heartbeat(
            term=TERM, worker=1, epoch=self.epoch, report=report or WorkerReport(), tasks=tasks, peers=[]
        )
        self._carry_out(self.state.worker_message(WORKER_LINK, message, self.now))
