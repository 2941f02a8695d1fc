"""``bench scale``: what the failover of one worker costs the coordinator of a large job.

The real machines of coordinator and workers, without sockets, threads or time: jobs of two sources and one
joiner for each slot, every source subtask connected to every joiner, four slots for each worker, and one
standby worker. One worker is lost. On the others only the channels exist that lead to it.

With N slots, of which K = 4 are lost, and W = N / K workers at first, see :func:`expected`::

    strategy     deploys   cancels     moves     messages to workers
    individual   3K        0           K slots   W verdicts, 1 deployment, W restarts
    full         3N        3 (N - K)   K slots   W verdicts, W - 1 cancels, W - 1 releases, W deployments,
                                                 W restarts

With ``individual`` 4NK - 2KK channels are attached anew: 2K sources to N joiners, and 2N sources to K
joiners, of which 2KK are the same. Above ``FULL_SLOTS_MAX`` slots ``full`` is not run: the table gives its
numbers, and its processor time grows with the square, since each worker hears of every new attempt.

When the W workers register, each on a host of its own, the coordinator asks for ``PROBES_PER_WORKER_MAX``
probes of links at most for each of them; all are answered at once here.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from minishuffle import limits
from minishuffle.config import ClusterSettings
from minishuffle.coordinator.clients.status import CoordinatorFacts
from minishuffle.coordinator.instructions import CoordinatorStep, SendToWorker
from minishuffle.coordinator.links import Links
from minishuffle.coordinator.state import CoordinatorState
from minishuffle.coordinator.workers import WorkerRegistry
from minishuffle.counters import TaskCounters
from minishuffle.errors import ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.exchange.elements import AssemblyBudget
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.control import encode_message, pack_message, unpack_message
from minishuffle.wire.messages import (
    CancelTasks,
    ControlMessage,
    DeployTasks,
    InputSpec,
    Probed,
    ReleaseJob,
    TasksRestarted,
    WorkerLost,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import AttemptReport, TaskStateChanged
from minishuffle.wire.requests import SubmitJob
from minishuffle.worker.instructions import Attach, ConnectLocal, FailChannel, RequestPartition
from minishuffle.worker.state import WorkerState

__all__ = ["count_probes", "expected", "measure_scale", "probes_max"]

Strategy = Literal["individual", "full"]

STRATEGIES: Final[tuple[Strategy, ...]] = ("individual", "full")
FORMULA: Final[Mapping[Strategy, str]] = {
    "individual": "decisions 4K, messages 2N/K + 1, tasks 3K, channels 4NK - 2KK",
    "full": "decisions 6N - 2K, messages 5N/K - 2, tasks 3N",
}
"""For N slots, of which K are lost."""
SIZES: Final = (100, 1000, 4000)
FULL_SLOTS_MAX: Final = 1000
SLOTS: Final = 4
"""Slots that each worker has."""
TERM: Final = 1
CLIENT: Final = 0
"""The client's link; a worker has that of its id."""
VICTIM: Final = 2
SEGMENTS: Final = 1 << 30
FAILOVER: Final = (WorkerLost, CancelTasks, ReleaseJob, DeployTasks, TasksRestarted)
"""What the coordinator sends to workers because of a failure."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a failover comes to. ``decisions``: attempts deployed and cancelled, and slots moved."""

    decisions: int
    messages: int
    tasks_touched: int
    """Tasks that stop and start again."""
    channels: int
    """Channels that are attached anew; -1: not counted."""


def expected(slots: int, strategy: Strategy) -> Costs:
    """By the closed formula."""
    n, k, w = slots, SLOTS, slots // SLOTS
    if strategy == "individual":
        return Costs(3 * k + k, 2 * w + 1, 3 * k, 4 * n * k - 2 * k * k)
    return Costs(3 * n + 3 * (n - k) + k, 5 * w - 2, 3 * n, -1)


def count_probes(workers: int) -> int:
    """So many probes are asked for when so many workers register, and each is answered at once."""
    settings, now, asked = ClusterSettings(slots=SLOTS), 0.0, 0
    registry = WorkerRegistry(settings, "3", "0")
    links = Links(TERM, settings.link_timeout)
    for number in range(1, workers + 1):
        about = _registration(number, standby=False).model_copy(update={"identity": str(number)})
        links.joined(registry.register(number, about, now), registry.alive(), now)
    while (at := links.next_deadline()) is not None:
        now = max(now, at)
        for number, probe in links.due(registry, now):
            asked += len(probe.peers)
            for peer in probe.peers:
                links.probed(number, Probed(term=TERM, worker=peer.worker, epoch=peer.epoch), now)
    return asked


def probes_max(workers: int) -> int:
    """By the closed formula."""
    return min(workers * (workers - 1) // 2, workers * limits.PROBES_PER_WORKER_MAX)


def _registration(number: int, *, standby: bool) -> Register:
    return Register(
        host="10.0.0.1",
        data_port=number,
        metrics_port=0,
        pid=number,
        slots=SLOTS,
        python="3",
        segments=SEGMENTS,
        segment_bytes=32_768,
        standby=standby,
    )


def _graph(slots: int, strategy: Strategy) -> JobGraph:
    vertices = [
        Vertex(
            name=name,
            parallelism=slots,
            operators=[name],
            is_source=name != "join",
            bounded=False,
            program=name.encode(),
        )
        for name in ("impressions", "clicks", "join")
    ]
    edges = [Edge(source=each, target=2, input=each, partitioner="hash") for each in (0, 1)]
    return JobGraph(vertices=vertices, edges=edges, settings=JobSettings(restart_strategy=strategy))


# --- coordinator ----------------------------------------------------------------------------------


class _Coordinator:
    """The machine, and what it has sent to whom."""

    def __init__(self) -> None:
        facts = CoordinatorFacts("scale", "0", "3", 1, TERM, 0.0)
        self.state = CoordinatorState(ClusterSettings(slots=SLOTS), facts, {}, lambda: 0.5, 0.0)
        self.epochs: dict[int, int] = {}
        self.sent: list[tuple[int, ControlMessage]] = []
        self.seconds = 0.0
        """Processor time of deciding, and of packing what is sent."""

    def call(self, step: CoordinatorStep) -> None:
        for instruction in step.messages:
            if isinstance(instruction, SendToWorker):
                if isinstance(instruction.message, Registered):
                    self.epochs[instruction.worker] = instruction.message.epoch
                elif isinstance(instruction.message, FAILOVER):
                    encode_message(instruction.message, 0)
                    self.sent.append((instruction.worker, instruction.message))
        for _ in step.submissions:
            self.call(self.state.journaled(None, 1.0))

    def begin(self, slots: int, strategy: Strategy) -> dict[int, bytes]:
        """Register all workers and start the job; gives what was deployed, packed."""
        for worker in range(1, slots // SLOTS + 2):
            register = _registration(worker, standby=worker > slots // SLOTS)
            self.call(self.state.worker_message(worker, register, 1.0))
        submit = SubmitJob(name="scale", python="3", graph=_graph(slots, strategy).to_bytes())
        self.call(self.state.client_request(CLIENT, 1, submit, 1.0))
        deployed = {worker: each for worker, each in self.sent if isinstance(each, DeployTasks)}
        if len(deployed) != slots // SLOTS:
            raise ShuffleError(f"the job of {slots} slots was not deployed on all workers")
        self.sent.clear()
        for worker, message in deployed.items():
            self.report(worker, message, "running")
        return {worker: pack_message(message) for worker, message in deployed.items()}

    def report(self, worker: int, message: DeployTasks, state: Literal["running", "canceled"]) -> None:
        for spec in message.tasks:
            attempt = AttemptId.of(message.job, spec.operator, spec.index, spec.attempt)
            changed = TaskStateChanged(attempt=attempt, state=state)
            report = AttemptReport(term=TERM, facts=[changed])
            self.call(self.state.worker_message(worker, report, 1.0))

    def lose(self, deployed: dict[int, DeployTasks]) -> None:
        """The victim is lost, and whom the coordinator cancels for that ends."""
        gc.collect()
        begin = time.process_time()
        self.call(self.state.link_closed(VICTIM, 1.0))
        self.call(self.state.process_gone(VICTIM, 1.0))
        for worker in [worker for worker, each in self.sent if isinstance(each, CancelTasks)]:
            self.report(worker, deployed[worker], "canceled")
        self.seconds = time.process_time() - begin

    def costs(self, slots: int) -> Costs:
        """Counted in the messages."""
        deployed = [spec for _, each in self.sent if isinstance(each, DeployTasks) for spec in each.tasks]
        cancelled = sum(len(each.attempts) for _, each in self.sent if isinstance(each, CancelTasks))
        moved = sum(
            len({spec.index for spec in each.tasks})
            for worker, each in self.sent
            if isinstance(each, DeployTasks) and worker > slots // SLOTS
        )
        return Costs(len(deployed) + cancelled + moved, len(self.sent), len(deployed), -1)


# --- workers --------------------------------------------------------------------------------------


class _Workers:
    """The machines of all workers but the victim, with the channels that lead to it.

    Args:
        epochs: of all workers.
        deployed: at first, by worker.
    """

    def __init__(self, epochs: dict[int, int], deployed: dict[int, DeployTasks]) -> None:
        settings = ClusterSettings(slots=SLOTS)
        self._machines = {
            worker: WorkerState(settings, worker, epoch, TERM, lambda attempt: None)
            for worker, epoch in epochs.items()
            if worker != VICTIM
        }
        self._lost = {spec.index for spec in deployed[VICTIM].tasks}
        self.standby = max(epochs)
        for worker, message in deployed.items():
            if worker != VICTIM:
                self._deploy(worker, message)

    def _deploy(self, worker: int, message: DeployTasks) -> None:
        machine = self._machines[worker]
        tasks = []
        for spec in message.tasks:
            inputs = [
                InputSpec(edge=gate.edge, input=gate.input, operator=gate.operator, first=slot, count=1)
                for gate in spec.inputs
                for slot in sorted(self._lost)
            ]
            tasks.append(spec.model_copy(update={"inputs": inputs}))
        ends = [address for address in message.workers if address.worker == VICTIM]
        deployed = machine.handle(message.model_copy(update={"tasks": tasks, "workers": ends}), 1.0)
        for instruction in (*deployed.messages, *machine.peer_up(VICTIM, 1.0).messages):
            if isinstance(instruction, RequestPartition):
                generation = instruction.request.generation
                machine.channel_event(instruction.channel, generation, ChannelEvent.ATTACH, 1.0)

    def recover(self, sent: Sequence[tuple[int, ControlMessage]]) -> int:
        """Deliver what the coordinator has sent, and everything that follows; gives how many channels are
        attached anew."""
        requests: list[tuple[int, RequestPartition]] = []
        attached: Counter[str] = Counter()
        for worker, message in sent:
            machine = self._machines[worker]
            instructions = list(machine.handle(message, 1.0).messages)
            for instruction in instructions:
                if isinstance(instruction, FailChannel):
                    generation = instruction.generation
                    drained = machine.channel_event(instruction.channel, generation, ChannelEvent.DRAIN, 1.0)
                    instructions += drained.messages
            if worker != self.standby and isinstance(message, TasksRestarted):
                instructions += machine.peer_up(self.standby, 1.0).messages
            attached["local"] += sum(isinstance(each, ConnectLocal) for each in instructions)
            requests += [(worker, each) for each in instructions if isinstance(each, RequestPartition)]
        for peer in self._machines:
            if peer != self.standby:
                found = self._machines[self.standby].peer_up(peer, 1.0).messages
                requests += [(self.standby, each) for each in found if isinstance(each, RequestPartition)]
        for worker, asked in requests:
            answer = self._machines[asked.worker].partition_requested(worker, asked.request, 1.0).messages
            attached["remote"] += sum(isinstance(each, Attach) for each in answer)
        return attached.total()


# --- points ---------------------------------------------------------------------------------------


def _bytes_of(make: Any) -> tuple[Any, int]:
    """What ``make`` gives, and the bytes that are kept of what it allocates."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _run(slots: int, strategy: Strategy) -> tuple[Costs, float, dict[str, int]]:
    """Costs, coordinator's processor seconds, and bytes."""
    coordinator = _Coordinator()
    packed, size = _bytes_of(lambda: coordinator.begin(slots, strategy))
    sizes = {"bytes_per_task": (size - sum(map(len, packed.values()))) // (3 * slots)}
    deployed = {worker: _unpacked(each) for worker, each in packed.items()}
    workers = _Workers(coordinator.epochs, deployed) if strategy == "individual" else None
    coordinator.lose(deployed)
    costs = coordinator.costs(slots)
    if workers is not None:
        costs = replace(costs, channels=workers.recover(coordinator.sent))
    replacement = next(
        each for worker, each in coordinator.sent if isinstance(each, DeployTasks) and worker > slots // SLOTS
    )
    _, size = _bytes_of(lambda: _gates(coordinator, replacement))
    sizes["bytes_per_channel"] = size // (2 * slots * SLOTS)
    return costs, coordinator.seconds, sizes


def _unpacked(packed: bytes) -> DeployTasks:
    message = unpack_message(packed)
    assert isinstance(message, DeployTasks)
    return message


def _gates(coordinator: _Coordinator, message: DeployTasks) -> list[Any]:
    """What the worker that takes the place of the lost one keeps of its channels before any is attached:
    entries of the registry, and the gates."""
    worker = max(coordinator.epochs)
    settings = ClusterSettings(slots=SLOTS)
    machine = WorkerState(settings, worker, coordinator.epochs[worker], TERM, lambda attempt: None)
    machine.handle(message, 1.0)
    pool = NetworkBufferPool(1, settings.segment_bytes).create_pool("gates", 1, 1)
    gates: list[Any] = [machine]
    for spec in message.tasks:
        for each in spec.inputs:
            gate = InputGate(
                each.edge,
                each.input,
                GateBuffers(pool, settings.segment_bytes, 2, 1),
                wake=lambda: None,
                give_back=lambda buffer: None,
                budget=AssemblyBudget(1),
                counters=TaskCounters(),
            )
            for producer in range(each.first, each.first + each.count):
                gate.add_channel(producer)
            gates.append(gate)
    return gates


def measure_scale(sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """A point for each size and strategy; those that are ``estimated`` were not run.

    Raises:
        ShuffleError: what was counted differs from the formula.
    """
    points: list[dict[str, Any]] = []
    for slots in sizes:
        probes, most = count_probes(slots // SLOTS), probes_max(slots // SLOTS)
        if probes > most:
            raise ShuffleError(f"{slots // SLOTS} workers are asked for {probes} probes, not {most} at most")
        for strategy in STRATEGIES:
            costs = expected(slots, strategy)
            estimated = strategy == "full" and slots > FULL_SLOTS_MAX
            if estimated:
                last = next(each for each in reversed(points) if each["strategy"] == "full")
                seconds = last["coordinator_cpu_seconds"] * (slots / last["slots"]) ** 2
                bytes_ = {name: last[name] for name in ("bytes_per_task", "bytes_per_channel")}
            else:
                found, seconds, bytes_ = _run(slots, strategy)
                if found != costs:
                    raise ShuffleError(f"{strategy} at {slots} slots costs {found}, not {costs}")
            points.append(
                {
                    "slots": slots,
                    "strategy": strategy,
                    "decisions": costs.decisions,
                    "messages": costs.messages,
                    "tasks_touched": costs.tasks_touched,
                    "channels": costs.channels,
                    "probes": probes,
                    "coordinator_cpu_seconds": round(seconds, 4),
                    **bytes_,
                    "estimated": estimated,
                }
            )
    return {"points": points, "formula": dict(FORMULA)}
