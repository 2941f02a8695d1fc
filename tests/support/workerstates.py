"""The machine of a worker with what it was deployed, for tests of its decisions."""

from __future__ import annotations

from minishuffle.config import ClusterSettings
from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import (
    ControlMessage,
    DeployTasks,
    ErrorInfo,
    InputSpec,
    OutputSpec,
    TaskSpec,
    WorkerAddress,
)
from minishuffle.wire.packed import pack_placement
from minishuffle.wire.reports import TaskStateChanged
from minishuffle.worker.channels.registry import ChannelKey, Progress
from minishuffle.worker.instructions import (
    Instruction,
    Report,
    WorkerStep,
)
from minishuffle.worker.state import WorkerState
from support.attempts import attempt as attempt_of

SETTINGS = ClusterSettings(
    task_cancel_timeout=10.0, abandoned_max=1, partition_request_timeout=5.0, reconnect_timeout=4.0
)
SOURCE = TaskSpec(
    operator=0,
    name="source",
    index=0,
    parallelism=2,
    attempt=1,
    inputs=[],
    outputs=[OutputSpec(edge=0, operator=1, first=0, count=2)],
)


def sink(attempt: int = 1) -> TaskSpec:
    """Consumer 0 of edge 0; producer 0 on worker 2, producer 1 on worker 3."""
    return TaskSpec(
        operator=1,
        name="sink",
        index=0,
        parallelism=2,
        attempt=attempt,
        inputs=[InputSpec(edge=0, input=0, operator=0, first=0, count=2)],
        outputs=[],
    )


def address(worker: int, epoch: int = 1) -> WorkerAddress:
    return WorkerAddress(worker=worker, epoch=epoch, host="127.0.0.1", data_port=9000 + worker)


def deploy(
    *tasks: TaskSpec,
    job: str = "j1",
    term: int = 1,
    workers: list[WorkerAddress] | None = None,
    strategy: str = "individual",
    on_unavailable: str = "drop",
) -> DeployTasks:
    return DeployTasks(
        term=term,
        job=job,
        name="job",
        settings={"restart_strategy": strategy, "on_unavailable": on_unavailable},
        programs={0: b"source", 1: b"sink"},
        tasks=list(tasks),
        workers=workers or [address(1), address(2), address(3)],
        placement={0: pack_placement([2, 3])},
    )


class Machine:
    """Worker 2 of three, validated after each step."""

    def __init__(self, worker: int = 2) -> None:
        self.progress: Progress = (0.0, 0, 0)
        """Of every task."""
        self.due: float | None = None
        """When the machine is to be called."""
        self.state = WorkerState(SETTINGS, worker, epoch=4, term=1, progress=lambda key: self.progress)

    def tell(self, message: ControlMessage, now: float = 0.0) -> list[Instruction]:
        return self.do(self.state.handle(message, now))

    def tick(self, now: float) -> list[Instruction]:
        return self.do(self.state.handle_timer(now))

    def up(self, worker: int, now: float = 0.0) -> list[Instruction]:
        return self.do(self.state.peer_up(worker, now))

    def down(self, worker: int, now: float = 0.0, error: PeerLost | None = None) -> list[Instruction]:
        error = error or PeerLost(f"the link to worker {worker} broke")
        return self.do(self.state.peer_down(worker, error, now))

    def asked(self, link: int, request: PartitionRequest, now: float = 0.0) -> list[Instruction]:
        return self.do(self.state.partition_requested(link, request, now))

    def dial_failed(
        self, worker: int, error: ShuffleError, now: float = 0.0, epoch: int = 1
    ) -> list[Instruction]:
        return self.do(self.state.dial_failed(address(worker, epoch), error, now))

    def do(self, step: WorkerStep) -> list[Instruction]:
        """Gives what the shell is to carry out."""
        self.state.validate()
        self.due = step.timers
        return list(step.messages)

    def happens(self, channel: ChannelKey, event: ChannelEvent, now: float = 0.0) -> list[Instruction]:
        """To the channel's current generation, as the shell reports it."""
        generation = self.state.channels.inputs[channel].request.generation
        return self.do(self.state.channel_event(channel, generation, event, now))

    def ended(self, operator: int = 0, attempt: int = 1, state: str = "finished") -> list[Instruction]:
        error = ErrorInfo(code=60, text="boom") if state == "failed" else None
        key = attempt_of(operator, number=attempt)
        ended = self.state.task_ended(key, state, error, b"", TaskCounters())
        return self.do(ended)


def request(
    attempt: int = 1,
    channel: int = 7,
    *,
    subpartition: int = 1,
    consumer_attempt: int = 1,
    generation: int = 1,
) -> PartitionRequest:
    return PartitionRequest(
        PartitionId(JobId("j1"), 0, 0),
        subpartition,
        attempt,
        consumer_attempt,
        generation,
        channel=channel,
        initial_credit=2,
    )


def second(spec: TaskSpec) -> TaskSpec:
    return spec.model_copy(update={"attempt": 2})


def states(instructions: list[Instruction]) -> list[str]:
    return [
        instruction.fact.state
        for instruction in instructions
        if isinstance(instruction, Report) and isinstance(instruction.fact, TaskStateChanged)
    ]


def serving(*tasks: TaskSpec) -> Machine:
    """With a link to worker 3, which the coordinator has announced."""
    machine = Machine()
    machine.tell(deploy(*tasks))
    machine.up(3)
    return machine
