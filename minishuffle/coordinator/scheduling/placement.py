"""Placement of jobs on slots, admission, and the messages that deploy and release tasks. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from minishuffle.coordinator.jobs.consumption import EndedChannels, LateEnds, repeating
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.lifecycle import PENDING, WAITING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.scheduling.slots import NOWHERE
from minishuffle.coordinator.scheduling.stageprogress import stage_slots
from minishuffle.coordinator.scheduling.workerinventory import Holdings
from minishuffle.coordinator.workers import Worker
from minishuffle.errors import InvalidGraph, ResourceExhausted, UsageError
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.plan.arguments import checked_job_name
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.plan.guarantee import check_guarantee, never_cut, receipted_by_cuts
from minishuffle.plan.stages import is_staged, slots_needed
from minishuffle.wire.advertised import linkable_groups, unlinkable
from minishuffle.wire.messages import (
    CancelTasks,
    ConsumerEnds,
    ConsumersEnded,
    ControlMessage,
    DeployTasks,
    InputSpec,
    OutputSpec,
    PlacedAttempt,
    ReleaseJob,
    TaskAttempt,
    TaskSpec,
    TasksRestarted,
    WorkerAddress,
)
from minishuffle.wire.packed import pack_placement
from minishuffle.wire.requests import SubmitJob

__all__ = [
    "BufferNeed",
    "admit",
    "buffers_needed",
    "cancellations",
    "check_buffers",
    "checked_graph",
    "current_attempts",
    "deployments",
    "move_slots",
    "place",
    "redeployments",
    "releases",
    "take_slots",
    "takers",
    "worker_need",
]


# --- placement ------------------------------------------------------------------------------------
#
# The slots of workers that run each subtask, and the check that a job fits: pure arithmetic.
#
# Slots are shared: subtask ``i`` of every operator of a slot group runs in slot ``i`` of that group, and the
# slots of one group follow those of another. A *placement* is a tuple with the worker id of each.


WORKERS_NAMED: Final = 5
"""Most workers named in one text."""
NONE_CLOSED: Final[Mapping[int, str]] = MappingProxyType({})
"""No worker is closed to the job."""
TERMS_SHOWN = 8
"""Most terms of the arithmetic shown in an error, the largest first."""


def place(free: Mapping[int, int], total: int, graph: JobGraph, lost: str = "") -> Placement:
    """Spread the job's slots evenly over the workers.

    Args:
        free: free slots of each alive worker.
        total: all slots of these workers, used ones included.
        lost: text about slots that are written off or on standby.

    Raises:
        ResourceExhausted: there are not enough slots; with the arithmetic.
    """
    needed, available = slots_needed(graph), sum(free.values())
    if needed > available:
        raise ResourceExhausted(
            f"job needs {needed} slots ({_which(graph)}), {available} are free of {total}{lost}: "
            "start more workers (--workers/--slots) or lower --parallelism"
        )
    # The worker with the fewest slots of this job; then the emptiest; then the lowest id.
    waiting = [(0, -count, worker) for worker, count in free.items() if count]
    heapq.heapify(waiting)
    slots: list[int] = []
    for _ in range(needed):
        taken, used, worker = waiting[0]
        slots.append(worker)
        if used == -1:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (taken + 1, used + 1, worker))
    return tuple(slots)


def _which(graph: JobGraph) -> str:
    groups = {vertex.slot_group for vertex in graph.vertices}
    text = (
        "greatest parallelism"
        if len(groups) == 1
        else f"greatest parallelism of each of {len(groups)} groups"
    )
    return f"{text} in one stage" if is_staged(graph) else text


@dataclass(slots=True)
class BufferNeed:
    """Segments that a job requires on one worker; ``terms`` counts equal parts of the sum."""

    segments: int = 0
    terms: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of equal terms by (formula, segments of one term)."""

    def add(self, formula: str, segments: int) -> None:
        self.segments += segments
        self.terms[formula, segments] += 1

    def arithmetic(self) -> str:
        """The sum as a reader can check it."""
        parts = sorted(self.terms.items(), key=lambda term: -term[0][1] * term[1])
        texts = [
            f"{formula} = {each}" if count == 1 else f"{count} x ({formula} = {each}) = {count * each}"
            for (formula, each), count in parts[:TERMS_SHOWN]
        ]
        if len(parts) > TERMS_SHOWN:
            texts.append(f"and {len(parts) - TERMS_SHOWN} more")
        return "; ".join(texts)


def worker_need(graph: JobGraph, slots: Iterable[int]) -> BufferNeed:
    """The least number of segments that a worker needs for these slots of the job.

    An input gate needs ``channels x exclusive + 1``, wherever its producers are, since these may move. A gate
    that external clients write to needs ``exclusive + 1``. A result partition needs ``consumers + 1``, or
    none if it is kept on disk or retained. These are the minimums with which a worker creates its local
    pools. An abandoned attempt keeps its pools while the next one runs, so there is room for one more task,
    the largest.
    """
    need = BufferNeed()
    largest, name = 0, ""
    kept = graph.kept_edges() | graph.retained_edges()
    for slot in slots:
        for key in graph.in_slot(slot):
            before = need.segments
            _add_task(need, graph, key, kept)
            if need.segments - before > largest:
                largest, name = need.segments - before, graph.vertices[key[0]].name
    if largest and graph.settings.restart_strategy != "none":
        need.add(f"a restart of {name} beside an attempt that does not stop", largest)
    return need


def _add_task(need: BufferNeed, graph: JobGraph, task: TaskKey, kept: frozenset[int]) -> None:
    operator, index = task
    vertex, exclusive = graph.vertices[operator], graph.settings.buffers_per_channel
    if vertex.stream:
        need.add(f"stream {vertex.stream}: {exclusive} exclusive + 1 floating", exclusive + 1)
    for number in graph.inputs_of(operator):
        channels = len(graph.producers_of(number, index))
        gate = f"input {graph.edges[number].input} of {vertex.name}"
        need.add(
            f"{gate}: {channels} channels x {exclusive} exclusive + 1 floating", channels * exclusive + 1
        )
    for number in graph.outputs_of(operator):
        if number in kept:
            continue
        consumers = len(graph.consumers_of(number, index))
        need.add(f"output of {vertex.name}: {consumers} consumers + 1", consumers + 1)


def buffers_needed(graph: JobGraph, placement: Placement) -> dict[int, BufferNeed]:
    """The segments that each worker needs for the job: see :func:`worker_need`."""
    slots: dict[int, list[int]] = {worker: [] for worker in sorted(set(placement))}
    for slot, worker in enumerate(placement):
        slots[worker].append(slot)
    return {worker: worker_need(graph, each) for worker, each in slots.items()}


def check_buffers(needs: Mapping[int, BufferNeed], free: Mapping[int, int], total: Mapping[int, int]) -> None:
    """Compare needs with the segments of each worker that no other job requires.

    Raises:
        ResourceExhausted: a worker has too few; with its arithmetic.
    """
    for worker, need in needs.items():
        if need.segments > free[worker]:
            raise ResourceExhausted(
                f"job needs {need.segments} network buffers on worker {worker}, {free[worker]} are free of "
                f"{total[worker]} ({need.arithmetic()}): raise network_memory_bytes of the workers "
                "(--network-memory-bytes) or lower --parallelism"
            )


# --- admission ------------------------------------------------------------------------------------
#
# Whether a submitted job is let in, and where it goes.


def checked_graph(message: SubmitJob, python: str) -> JobGraph:
    """The graph of a submission; ``python`` is the cluster's major.minor.

    Raises:
        UsageError: the name is not valid, the client's Python is another one, or the graph is not valid.
    """
    if message.python != python:
        raise UsageError(
            f"the job was made with Python {message.python[:20]}, this cluster runs Python {python}, and "
            f"functions are pickled between them: submit it with Python {python}"
        )
    checked_job_name(message.name)
    graph = JobGraph.from_bytes(message.graph)
    if not graph.vertices:
        raise InvalidGraph("the job has no operators: give it a source and a sink")
    check_guarantee(graph)
    return graph


def admit(
    graph: JobGraph, workers: Sequence[Worker], held: Holdings, closed: Mapping[int, str] = NONE_CLOSED
) -> tuple[Placement, dict[int, int]]:
    """The placement of a new job, and the segments it requires on each worker. Standby workers take no new
    jobs.

    Args:
        held: slots and segments of all other jobs.
        closed: workers that take no slots of this job, with the reason as it follows their name.

    Raises:
        ResourceExhausted: the job does not fit; with the arithmetic.
    """
    if graph.snapshotted() and len(takers(workers)) == 1 and (else_do := _instead_of_holders(graph)):
        raise ResourceExhausted(
            f'guarantee="{graph.settings.guarantee}" needs two workers, since each holds snapshots of the '
            "other's tasks, and one is there: start another (--workers, or 'minishuffle worker start'), "
            f'{else_do}, or use guarantee="loss"'
        )
    refused: list[ResourceExhausted] = []
    regular = [worker for worker in takers(workers) if not worker.standby and worker.worker not in closed]
    spare = _spare_slots(workers)
    groups = [
        [worker for number, worker in enumerate(regular) if number in group]
        for group in linkable_groups([worker.about for worker in regular])
    ]
    free = {worker.worker: max(0, worker.slots - held.slots[worker.worker]) for worker in regular}
    for group in sorted(groups, key=lambda group: -sum(free[worker.worker] for worker in group)):
        apart = [worker for worker in regular if worker not in group]
        try:
            return _admit_to(graph, group, held, _not_there(group, spare, apart) + _closed_text(closed))
        except ResourceExhausted as error:
            refused.append(error)
    raise refused[0]


def _instead_of_holders(graph: JobGraph) -> str:
    """How to change a job with a guarantee that needs holders of snapshots; empty if it needs none."""
    if not graph.settings.durable_interval or never_cut(graph):
        return "have durable snapshots taken (durable_interval)"
    by_cuts = receipted_by_cuts(graph)
    others = [each.stream for n, each in enumerate(graph.vertices) if each.stream and n not in by_cuts]
    return f"read what stream {others[0]!r} gives from a source of the job's own" if others else ""


def _closed_text(closed: Mapping[int, str]) -> str:
    return "".join(f" (worker {number} {why})" for number, why in sorted(closed.items()))


def _spare_slots(workers: Iterable[Worker]) -> str:
    """Text about slots of workers that take no new jobs, for the arithmetic."""
    standby = sum(worker.slots for worker in takers(workers) if worker.standby)
    leaving = sum(worker.slots for worker in workers if worker.drain is not None)
    text = f" ({standby} more are on standby, for those of lost workers alone)" if standby else ""
    return text + (f" ({leaving} more are of workers that are to leave)" if leaving else "")


def _not_there(workers: Sequence[Worker], spare: str, apart: Sequence[Worker]) -> str:
    """Text about slots that a job cannot have, for the arithmetic: ``spare`` ones, and slots of workers
    ``apart``, which cannot link with these."""
    gone = [f"{len(each.written_off)} of worker {each.worker}" for each in workers if each.written_off]
    text = f" (written off: {', '.join(gone)}, where tasks that were abandoned still run)" if gone else ""
    text += spare
    if confined := [each for each in [*workers, *apart] if each.on_loopback and apart]:
        names = ", ".join(each.place for each in confined[:WORKERS_NAMED])
        more = sum(worker.slots for worker in apart)
        text += (
            f" ({more} more cannot be had together with these: other hosts do not reach {names}; start what "
            "is on loopback with --host or --advertise, and an address of the network)"
        )
    return text


def _admit_to(
    graph: JobGraph, workers: Sequence[Worker], held: Holdings, lost: str
) -> tuple[Placement, dict[int, int]]:
    """Admit a job to workers that can link with each other; ``lost`` is for the arithmetic. A job deployed in
    stages fits if its widest stage does, and takes no slots yet."""
    free = {worker.worker: max(0, worker.slots - held.slots[worker.worker]) for worker in workers}
    placement = place(free, sum(worker.slots for worker in workers), graph, lost)
    total = {worker.worker: worker.about.segments for worker in workers}
    segments = {worker: total[worker] - held.segments[worker] for worker in total}
    if is_staged(graph):
        for slots in stage_slots(graph):
            placed = dict(zip(sorted(slots), placement, strict=False))
            on = {worker: [slot for slot in placed if placed[slot] == worker] for worker in total}
            check_buffers({worker: worker_need(graph, on[worker]) for worker in total}, segments, total)
        return (NOWHERE,) * graph.slots_needed, {}
    needs = buffers_needed(graph, placement)
    check_buffers(needs, segments, total)
    return placement, {worker: need.segments for worker, need in needs.items()}


def takers(workers: Iterable[Worker]) -> list[Worker]:
    """The workers that take slots: all except draining ones."""
    return [worker for worker in workers if worker.drain is None]


def move_slots(
    job: Job,
    slots: Collection[int],
    workers: Sequence[Worker],
    held_by_all: Holdings,
    called: set[int],
    *,
    closed: Mapping[int, str] = NONE_CLOSED,
    all_or_none: bool = False,
) -> None:
    """Give slots of a job, vacant or on draining workers, to workers with room (``all_or_none``: all).

    The order of workers: those in ``called``; standby ones with the jobs' programs loaded; regular ones;
    other standby ones; then fewest slots of the job, emptiest, lowest id. A standby worker becomes regular.

    Args:
        called: standby workers called up for the same loss; new ones are added.
        closed: workers that take none of the slots, with the reason as it follows their name.
    """

    def order(worker: Worker) -> tuple[bool, int, int, int, int]:
        number = worker.worker
        return number not in upon, _rank(worker, held_by_all.running), held[number], -free[number], number

    def links(worker: Worker) -> bool:
        """Whether it can link with all workers that have slots or partitions of the job."""
        beside = (each for each in workers if each.worker in {*held, *job.slots.left} and each is not worker)
        return not any(unlinkable(worker.about, each.about) for each in beside)

    used, required = held_by_all.slots.copy(), held_by_all.segments.copy()
    held, segments = +job.slots.held(), dict(job.slots.segments)
    there = {each.worker: [*job.slots.on([each.worker]), *job.slots.coming(each.worker)] for each in workers}
    able, upon = takers(workers), set(called)
    found: dict[int, Worker] = {}
    for slot in slots:
        free = {worker.worker: worker.slots - used[worker.worker] for worker in able}
        for worker in sorted(able, key=order):
            number = worker.worker
            if free[number] <= 0 or number in closed or not links(worker):
                continue
            need = worker_need(job.graph, [*there[number], slot]).segments
            if required[number] + need - segments.get(number, 0) > worker.about.segments:
                continue
            required[number] += need - segments.get(number, 0)
            used[number] += 1
            held[number] += 1
            segments[number] = need
            there[number].append(slot)
            found[slot] = worker
            if worker.standby:
                upon.add(number)
            break
        else:
            if slot in job.slots.vacant:
                job.slots.lacks(_shortage(able, used, closed))
    for slot, worker in found.items() if len(found) == len(slots) or not all_or_none else ():
        job.slots.move(slot, worker.worker, segments[worker.worker])
        if worker.standby:
            worker.call_up()
            called.add(worker.worker)


def take_slots(
    job: Job,
    slots: Collection[int],
    workers: Sequence[Worker],
    held_by_all: Holdings,
    closed: Mapping[int, str] = NONE_CLOSED,
) -> str:
    """Give all of these vacant slots, which were not lost, to regular workers that can link with each other,
    or give none. Returns why not, else an empty text. The arguments are those of :func:`move_slots`."""
    regular = [each for each in takers(workers) if not each.standby]
    free = {each.worker: max(0, each.slots - held_by_all.slots[each.worker]) for each in regular}
    groups = [
        {regular[n].worker for n in group} for group in linkable_groups([each.about for each in regular])
    ]
    for group in sorted(groups, key=lambda group: -sum(free[number] for number in group)):
        apart = {number: "cannot reach the others" for number in free if number not in group}
        shut = {**apart, **closed}
        move_slots(job, slots, regular, held_by_all, set(), closed=shut, all_or_none=True)
        if not job.slots.vacant.intersection(slots):
            return ""
    wanted = f"{len(slots)} free slot{'s' if len(slots) > 1 else ''}"
    if sum(free.values()) < len(slots):
        return f"{wanted}: {sum(free.values())} of {sum(each.slots for each in regular)} are free"
    return f"{wanted}: {job.slots.shortage}"


def _rank(worker: Worker, jobs: int) -> int:
    """The rank of a worker: standby workers that have loaded ``jobs`` jobs first, standby workers that still
    load last."""
    return 1 if not worker.standby else 0 if worker.report.jobs_loaded >= jobs else 2


def _shortage(workers: Sequence[Worker], used: Mapping[int, int], closed: Mapping[int, str]) -> str:
    """Why none of these alive workers takes the vacant slot of a job."""
    if len(workers) == 0:
        return "no other worker is there"
    shut = [worker for worker in workers if worker.worker in closed and used[worker.worker] < worker.slots]
    if shut:
        why = "; ".join(f"worker {each.worker} {closed[each.worker]}" for each in shut)
        rest = [worker for worker in workers if worker.worker not in closed]
        return f"{why}; {_shortage(rest, used, {})}" if rest else why
    slots = sum(worker.slots for worker in workers)
    free = {worker.worker: max(0, worker.slots - used[worker.worker]) for worker in workers}
    if not any(free.values()):
        return f"no other worker has a free slot ({slots} of {slots} are taken)"
    names = ", ".join(str(number) for number, count in free.items() if count)
    why = "have too few network buffers left for it, or cannot reach its other workers"
    return f"{sum(free.values())} of {slots} slots are free, on workers ({names}) that {why}"


# --- deployment -----------------------------------------------------------------------------------


_NOTHING_DONE: Final = EndedChannels({}, {})
_Range: TypeAlias = "tuple[int, int, int]"
"""Operator, first subtask and number of subtasks."""


def deployments(
    graph: JobGraph,
    placement: Placement,
    addresses: Sequence[WorkerAddress],
    *,
    term: int,
    job: str,
    name: str,
    tasks: Iterable[TaskKey] | None = None,
    attempts: Mapping[TaskKey, TaskAttempt] = MappingProxyType({}),
    resumptions: Mapping[TaskKey, Resumption] = MappingProxyType({}),
    done: Mapping[TaskKey, EndedChannels] = MappingProxyType({}),
    elsewhere: Mapping[TaskKey, int] = MappingProxyType({}),
    waiting: Collection[TaskKey] = (),
) -> dict[int, DeployTasks]:
    """The message for each worker that takes part; ``addresses`` are those of all of them.

    Each worker gets the addresses of the workers at the other end of its channels, which it may dial or be
    dialed by.

    Args:
        placement: 0 for a slot without a worker. Requests of its consumers go to their own worker, and wait
            there until the slot has a worker.
        tasks: the tasks to deploy; by default all.
        attempts: of subtasks not at their first attempt.
        resumptions: the states from which tasks continue.
        done: the channels of tasks that have ended.
        elsewhere: the workers of finished tasks that are not where their slot is.
        waiting: subtasks that are not deployed yet, nor now.
    """
    if tasks is None:
        tasks = [(o, index) for o, vertex in enumerate(graph.vertices) for index in range(vertex.parallelism)]
    specs: dict[int, list[TaskSpec]] = {}
    firsts, exchanges, by_cuts = graph.first_slots(), _Exchanges.of(graph), receipted_by_cuts(graph)
    for operator, index in tasks:
        key = (operator, index)
        now, ends = attempts.get(key), done.get(key, _NOTHING_DONE)
        spec = _task(graph, key, now, ends, exchanges=exchanges, waiting=waiting)
        slot = firsts[operator] + index
        spec = spec.model_copy(update={"slot": slot, "receipts_by_cuts": operator in by_cuts})
        if (resumption := resumptions.get((operator, index))) is not None:
            spec = spec.model_copy(update=resumption._asdict() | {"files": dict(resumption.files)})
        specs.setdefault(placement[spec.slot], []).append(spec)
    beside: dict[frozenset[_Range], list[TaskAttempt]] = {}  # the same for many workers
    return {
        worker: DeployTasks(
            term=term,
            job=job,
            name=name,
            settings=graph.settings.model_dump() | {"on_unavailable": graph.on_unavailable},
            programs={spec.operator: graph.vertices[spec.operator].program for spec in here},
            tasks=here,
            workers=_neighbour_addresses(here, firsts, at, elsewhere, addresses),
            placement=_tables(graph, here, at, elsewhere),
            attempts=_neighbour_attempts(here, attempts, beside),
        )
        for worker, here in sorted(specs.items())
        for at in [tuple(each or worker for each in placement)]
    }


def _tables(
    graph: JobGraph, specs: Sequence[TaskSpec], placement: Placement, elsewhere: Mapping[TaskKey, int]
) -> dict[int, bytes]:
    """The packed placement of each operator that feeds one of these tasks."""
    tables, firsts = {}, graph.first_slots()
    for operator in {gate.operator for spec in specs for gate in spec.inputs}:
        first = firsts[operator]
        workers = list(placement[first : first + graph.vertices[operator].parallelism])
        for key, worker in elsewhere.items():
            if key[0] == operator:
                workers[key[1]] = worker
        tables[operator] = pack_placement(tuple(workers))
    return tables


def _neighbour_attempts(
    specs: Sequence[TaskSpec],
    attempts: Mapping[TaskKey, TaskAttempt],
    known: dict[frozenset[_Range], list[TaskAttempt]],
) -> list[TaskAttempt]:
    """The attempts of the producers and consumers of these tasks; ``known`` caches the answers."""
    ranges = frozenset(
        [(gate.operator, gate.first, gate.count) for spec in specs for gate in spec.inputs]
        + [(output.operator, output.first, output.count) for spec in specs for output in spec.outputs]
    )
    if ranges not in known:
        known[ranges] = [
            attempt
            for (operator, index), attempt in attempts.items()
            if any(operator == beside and first <= index < first + count for beside, first, count in ranges)
        ]
    return known[ranges]


def _neighbour_addresses(
    specs: Sequence[TaskSpec],
    firsts: Sequence[int],
    placement: Placement,
    elsewhere: Mapping[TaskKey, int],
    addresses: Sequence[WorkerAddress],
) -> list[WorkerAddress]:
    """The addresses of the workers of these tasks' producers and consumers, and of those that keep their
    state."""
    ranges = {(firsts[gate.operator] + gate.first, gate.count) for spec in specs for gate in spec.inputs}
    ranges |= {(firsts[each.operator] + each.first, each.count) for spec in specs for each in spec.outputs}
    ends = {worker for first, count in ranges for worker in placement[first : first + count]}
    ends |= {*elsewhere.values(), *(spec.state_worker for spec in specs)}
    return [address for address in addresses if address.worker in ends]


class _Exchanges(NamedTuple):
    """Kept and retained edges; repeating sources; operators that run again from the beginning; sources that
    keep their version if a subtask has one split; retained edges by which the next attempt of a producer may
    give a consumer rows that others had before."""

    kept: frozenset[int]
    retained: frozenset[int]
    repeating: frozenset[int]
    replayed: frozenset[int]
    one_split: frozenset[int]
    redealt: frozenset[int]

    @classmethod
    def of(cls, graph: JobGraph) -> _Exchanges:
        kept, retained, same = graph.kept_edges(), graph.retained_edges(), graph.same_rows()
        one_split = graph.same_rows(of_one_split=True) - same
        redealt = frozenset(
            each for each in retained if not (graph.edges[each].source in same or graph.parts_alike(each))
        )
        return cls(kept, retained, repeating(graph, kept), graph.replayed(), one_split, redealt)


def _task(
    graph: JobGraph,
    key: TaskKey,
    attempt: TaskAttempt | None,
    done: EndedChannels,
    *,
    exchanges: _Exchanges,
    waiting: Collection[TaskKey],
) -> TaskSpec:
    """The specification of a task to deploy; ``waiting`` are subtasks not deployed yet."""
    (operator, index), kept, retained = key, exchanges.kept, exchanges.retained
    vertex, inputs, outputs = graph.vertices[operator], [], []
    for number in graph.inputs_of(operator):
        edge, producers = graph.edges[number], graph.producers_of(number, index)
        inputs.append(
            InputSpec(
                edge=number,
                input=edge.input,
                operator=edge.source,
                first=producers.start,
                count=len(producers),
                kept=number in kept,
                ended=done.ended.get(number, []),
                later=[each for each in producers if (edge.source, each) in waiting] if waiting else [],
                waits=edge.source in exchanges.repeating or number in retained,
                strict=edge.source in exchanges.replayed and number not in kept,
                guaranteed=number in retained,
                redealt=number in exchanges.redealt,
            )
        )
    for number in graph.outputs_of(operator):
        consumers = graph.consumers_of(number, index)
        outputs.append(
            OutputSpec(
                edge=number,
                operator=graph.edges[number].target,
                first=consumers.start,
                count=len(consumers),
                kept=number in kept,
                retained=number in retained,
                bounded=graph.edges[number].kind != "pipelined",
                shared=graph.edges[number].partitioner == "broadcast",
                closed=done.closed.get(number, []),
                announced=graph.settings.schedule == "first_output" and number not in kept,
            )
        )
    return TaskSpec(
        operator=operator,
        name=vertex.name,
        index=index,
        parallelism=vertex.parallelism,
        attempt=attempt.attempt if attempt is not None else FIRST_ATTEMPT,
        inputs=inputs,
        outputs=outputs,
        stream=vertex.stream,
        sink=vertex.sink,
        bounded=vertex.bounded,
        version=attempt.version if attempt is not None else 0,
        one_split=vertex.is_source and operator in exchanges.one_split,
    )


def redeployments(
    job: Job, tasks: Sequence[Subtask], addresses: Mapping[int, WorkerAddress], *, term: int, at: float
) -> list[tuple[int, ControlMessage]]:
    """Deploy the next attempts of pending tasks, or the first attempts of waiting ones, whose slots have
    workers. Returns the messages and their workers, in order.

    A worker gets one message of each kind, however many tasks restart: ReleaseJob for previous attempts that
    it still has, unless it keeps their state for the next ones; DeployTasks; and TasksRestarted, if it has
    running attempts that exchange rows with one of the tasks, or keeps its state.
    """
    released: dict[int, list[TaskAttempt]] = {}
    job.ends.next_round()
    for task in tasks:
        last = TaskAttempt(operator=task.operator, index=task.index, attempt=task.attempt)
        worker = job.deployed(task, at)
        keeps = task.resumption.keeps_state and task.resumption.state_attempt == last.attempt
        if worker is not None and not keeps:
            released.setdefault(worker, []).append(last)
    messages: list[tuple[int, ControlMessage]] = [
        (worker, ReleaseJob(term=term, job=job.id, attempts=attempts))
        for worker, attempts in sorted(released.items())
    ]
    slots = job.slots
    placement = tuple(0 if slot in slots.vacant else worker for slot, worker in enumerate(slots.placement))
    deployed = deployments(
        job.graph,
        placement,
        list(addresses.values()),
        name=job.name,
        tasks=[task.key for task in tasks],
        attempts=_named_attempts(job),
        resumptions={task.key: task.resumption for task in tasks},
        done={task.key: job.ends.ended_channels(task.key) for task in tasks},
        elsewhere=job.stayed(),
        waiting={task.key for task in job.subtasks.values() if task.state == WAITING},
        term=term,
        job=job.id,
    )
    pause = {"barrier": job.pause.barrier, "paused": job.pause.is_out}
    messages += [(worker, each.model_copy(update=pause)) for worker, each in deployed.items()]
    restarted: dict[int, dict[TaskKey, PlacedAttempt]] = {}
    for task, neighbours in zip(tasks, _neighbour_workers(job, tasks), strict=True):
        placed = placed_attempt(task)
        for worker in neighbours:
            restarted.setdefault(worker, {})[task.key] = placed
    for worker, attempts in sorted(restarted.items()):
        workers = [addresses[number] for number in sorted({each.worker for each in attempts.values()})]
        message = TasksRestarted(term=term, job=job.id, tasks=list(attempts.values()), workers=workers)
        messages.append((worker, message))
    return messages


def _named_attempts(job: Job) -> dict[TaskKey, TaskAttempt]:
    """The attempts of all subtasks not at their first: the current one, or the next one while it is
    pending."""
    found = {}
    for task in job.subtasks.values():
        attempt = task.attempt + (task.state in PENDING or task.state == WAITING)
        if attempt != FIRST_ATTEMPT:
            keeps_version = task.repeated or task.same_rows or task.version < task.attempt
            keeps_version = keeps_version and not task.starts_over
            version = task.version if keeps_version else 0
            found[task.key] = TaskAttempt(
                operator=task.operator, index=task.index, attempt=attempt, version=version
            )
    return found


def placed_attempt(task: Subtask) -> PlacedAttempt:
    """The current attempt of a subtask."""
    return PlacedAttempt(
        operator=task.operator,
        index=task.index,
        attempt=task.attempt,
        version=task.version if task.version < task.attempt else 0,
        worker=task.worker,
    )


def _neighbour_workers(job: Job, tasks: Sequence[Subtask]) -> list[set[int]]:
    """For each task, the workers to tell of its new attempt.

    These are its own worker, unless it is the first attempt, the workers with its state or its snapshots (the
    former holder's too, if the attempt reads from there), and the workers of attempts that exchange rows with
    it or may be asked for rows. Consumers that have read all its rows are left out, and so are tasks deployed
    together with it, whose DeployTasks names it.
    """
    together = {task.key for task in tasks}
    keepers = [{task.resumption.state_worker, job.holders.worker_of(task.key)} for task in tasks]
    others: dict[int, list[Subtask]] = {}
    for task in job.subtasks.values():
        live = task.on_worker and task.state in ("created", "running", "finished")
        if live and task.key not in together:
            others.setdefault(task.operator, []).append(task)
    found = []
    for task, workers in zip(tasks, keepers, strict=True):
        if task.attempt > FIRST_ATTEMPT:
            workers.add(task.worker)
        for operator, indices in job.graph.neighbours(*task.key):
            workers.update(
                other.worker
                for other in others.get(operator, ())
                if other.index in indices and not job.ends.read_between(task.key, other.key)
            )
        found.append(workers - {0})
    return found


def releases(job: Job, *, term: int) -> list[tuple[int, ControlMessage]]:
    """Free the partitions of finished tasks that consumers no longer need, and the state of moved ones that
    was read: messages and their workers."""
    named: dict[int, list[TaskAttempt]] = {}
    spent = [(task.worker, task.key, task.attempt) for task in job.ends.take_spent()]
    for worker, (operator, index), number in [*spent, *job.moved_state.take_done()]:
        attempt = TaskAttempt(operator=operator, index=index, attempt=number)
        named.setdefault(worker, []).append(attempt)
    return [
        (worker, ReleaseJob(term=term, job=job.id, attempts=attempts))
        for worker, attempts in sorted(named.items())
    ]


def consumer_ends(job: str, found: Iterable[LateEnds], *, term: int) -> list[tuple[int, ConsumersEnded]]:
    """Tell attempts about consumers that need none of their rows: messages and their workers."""
    named: dict[int, list[ConsumerEnds]] = {}
    for task, edge, consumers in found:
        ends = ConsumerEnds(
            operator=task.operator, index=task.index, attempt=task.attempt, edge=edge, consumers=consumers
        )
        named.setdefault(task.worker, []).append(ends)
    return [(worker, ConsumersEnded(term=term, job=job, ends=ends)) for worker, ends in sorted(named.items())]


def cancellations(job: Job, *, term: int) -> list[tuple[int, ControlMessage]]:
    """Cancel the attempts that must end before their next attempts are deployed: messages and their
    workers."""
    named: dict[int, list[Subtask]] = {}
    for task in job.cancellations.take():
        named.setdefault(task.worker, []).append(task)
    return [
        (worker, CancelTasks(term=term, job=job.id, attempts=current_attempts(tasks)))
        for worker, tasks in sorted(named.items())
    ]


def current_attempts(tasks: Iterable[Subtask]) -> list[TaskAttempt]:
    """The current attempts of ``tasks``."""
    return [TaskAttempt(operator=each.operator, index=each.index, attempt=each.attempt) for each in tasks]
