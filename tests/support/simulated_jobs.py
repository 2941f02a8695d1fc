"""Jobs for simulated clusters: random graphs whose rows say where they come from, and the audit of them.

Each row is ``[split, number in the split, operator, index, attempt, number, padding]``: where the source has
it from, and which attempt of which subtask sent it last, with a number that this attempt counts. So the audit
knows of every exchange what was sent, what came, and in which order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeAlias

import cloudpickle
import pyarrow as pa

from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Emit, Mark, Output, TaskContext, Watermark
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.state_parts import ORDER, StatePart, in_order, versioned
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.programs import ProgramSpec, pack_program

__all__ = ["Audit", "Injected", "Mischief", "Plan", "Strategy", "is_side", "make_plan"]

Sender: TypeAlias = tuple[int, int, int]
"""Operator, index, attempt."""
Strategy: TypeAlias = Literal["individual", "region", "full", "none"]
Mischief: TypeAlias = Literal["raise in open", "raise", "stick"]
"""A task raises when it opens or at its next batch, or does not react for a while."""

SPLITS_MAX = 5
SPLIT_ROWS_MAX = 120
GUARANTEED_RATES = (50.0, 100.0, 300.0, 1_000.0)
BATCH_ROWS_MAX = 6
TAKEN_ROWS = 4 * (BATCH_ROWS_MAX + 1)
"""So many that batches of sources are taken together, and what comes of that is not."""
ELEMENT_ROWS_MAX = TAKEN_ROWS + BATCH_ROWS_MAX
PADDING_BYTES = (0, 20, 200, 900)
SLOW_SECONDS = (0.0, 0.0, 0.0, 0.002, 0.02)
"""What a batch costs at the most."""
STICK_SECONDS = 3.0
KINDS: tuple[Literal["hash", "rebalance", "rescale", "broadcast"], ...] = (
    "hash",
    "rebalance",
    "rescale",
    "broadcast",
)


class Injected(Exception):
    """What a task raises because the seed wants it to."""


# --- audit ----------------------------------------------------------------------------------------


@dataclass
class Audit:
    """What every attempt has sent and received."""

    now: Callable[[], float]
    sleep: Callable[[float], None]
    """Have the calling task thread do nothing for so many seconds."""
    random: Random
    rows: int = 0
    """Received so far, by all."""
    sent: Counter[Sender] = field(default_factory=Counter)
    received: dict[Sender, dict[Sender, list[int]]] = field(default_factory=dict)
    """By receiver and sender, the numbers of the rows in the order in which they came."""
    got: dict[Sender, Counter[tuple[int, int, int]]] = field(default_factory=dict)
    """By receiver, rows: operator of who has sent it, split, number in the split."""
    sides: dict[Sender, Counter[tuple[int, int, int, int]]] = field(default_factory=dict)
    """By receiver, rows of sides: split, number in the split, operator and index of who has sent it."""
    twice: list[str] = field(default_factory=list)
    """Rows of sides that came to an attempt once more."""
    passed: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """By operator, the rows of sources (split and number) that its subtasks have had."""
    came: dict[tuple[int, int], Counter[tuple[int, int]]] = field(default_factory=dict)
    """By the operators at both ends, how often each row of sources came, whichever attempts were there."""
    watermarks: dict[tuple[Sender, int], int] = field(default_factory=dict)
    """The last one that an attempt had at an input."""
    kept: dict[Sender, int] = field(default_factory=dict)
    """The count of rows that an attempt has written down as its state."""
    restored: dict[Sender, Sender] = field(default_factory=dict)
    """The attempt whose state an attempt goes on with."""
    mischief: list[tuple[int, int, Mischief]] = field(default_factory=list)
    """Operator and index of subtasks, and what they are to do."""
    done: set[tuple[int, int]] = field(default_factory=set)
    """Those that have raised."""
    begun_from: int = 0
    """Attempts that have begun with rows in their state."""
    seen: dict[tuple[int, int], tuple[int, Counter[tuple[int, int, int]]]] = field(default_factory=dict)
    """By subtask that has ended and loses nothing, its latest attempt, and the rows (operator of who has sent
    it, split, number in the split) in its state."""
    ended: set[Sender] = field(default_factory=set)
    """Attempts that have come to their end."""

    def do_mischief(self, operator: int, index: int, *kinds: Mischief) -> None:
        """What this subtask is to do of these kinds.

        Raises:
            Injected: it is to raise.
        """
        for each in self.mischief:
            if each[:2] == (operator, index) and each[2] in kinds:
                self.mischief.remove(each)
                if each[2] == "stick":
                    self.sleep(STICK_SECONDS)
                    return
                self.done.add((operator, index))
                raise Injected(f"operator {operator}[{index}]: {each[2]}")

    def take(self, receiver: Sender, rows: list[Any]) -> None:
        """An attempt receives rows."""
        self.rows += len(rows)
        self.passed.setdefault(receiver[0], set()).update((row[0], row[1]) for row in rows)
        mine = self.received.setdefault(receiver, {})
        self.got.setdefault(receiver, Counter()).update((row[2], row[0], row[1]) for row in rows)
        for row in rows:
            self.came.setdefault((row[2], receiver[0]), Counter())[row[0], row[1]] += 1
        for split, at, operator, index, attempt, number, padding in rows:
            assert padding == padding_of(split, at), f"row {at} of split {split} has changed"
            numbers = mine.setdefault((operator, index, attempt), [])
            assert not numbers or numbers[-1] < number, (
                f"{receiver} receives row {number} of {(operator, index, attempt)} behind {numbers[-1]}"
            )
            numbers.append(number)

    def take_side(self, receiver: Sender, rows: list[Any]) -> None:
        """An attempt receives rows that are kept for it, and sends none of them on."""
        self.rows += len(rows)
        counted = self.sides.setdefault(receiver, Counter())
        for row in rows:
            assert row[6] == padding_of(row[0], row[1]), f"row {row[1]} of split {row[0]} has changed"
            counted[row[0], row[1], row[2], row[3]] += 1
            if counted[row[0], row[1], row[2], row[3]] == 2:
                self.twice.append(f"{receiver} has {row[:4]} of a side twice")

    def watermark(self, receiver: Sender, input: int, time: int) -> None:
        last = self.watermarks.get((receiver, input))
        assert last is None or last < time, f"{receiver} has watermark {time} behind {last}"
        self.watermarks[receiver, input] = time

    def keep(self, me: Sender, count: int) -> None:
        """An attempt writes down its count of rows."""
        self.kept[me] = count

    def restore(self, me: Sender, attempt: int, count: int) -> None:
        """An attempt goes on with the count of an earlier one."""
        before = (*me[:2], attempt)
        assert self.kept.get(before) == count, f"{me} reads {count} of {before}, which wrote {self.kept}"
        self.restored[me] = before

    def check_state(self) -> None:
        """The state that an attempt goes on with counts each row that earlier ones have received in the line
        of those that moved."""
        for me, before in self.restored.items():
            rows, each = 0, before
            while True:
                rows += sum(map(len, self.received.get(each, {}).values()))
                if each not in self.restored:
                    break
                each = self.restored[each]
            assert self.kept[before] == rows, f"{me} goes on with {self.kept[before]} rows instead of {rows}"

    def note_end(self, me: Sender, seen: Counter[tuple[int, int, int]]) -> None:
        """An attempt has come to its end with these rows in its state."""
        self.ended.add(me)
        if me[2] >= self.seen.get(me[:2], (0,))[0]:
            self.seen[me[:2]] = me[2], Counter(seen)

    def check_nothing_lost(self, plan: Plan, *, comes_again: bool, once: frozenset[int]) -> None:
        """Each row is in the state of who is to have it, and more than once only if that may be, but of
        operators that are in ``once``."""
        for edge in plan.graph.edges:
            everyone = edge.partitioner == "broadcast"
            target = plan.graph.vertices[edge.target]
            states = [self.seen[edge.target, index][1] for index in range(target.parallelism)]
            for counts in states if everyone else [sum(states, Counter())]:
                came = Counter({row[1:]: times for row, times in counts.items() if row[0] == edge.source})
                expected = plan.copies_of(edge.source)
                lost = set(expected) - set(came)
                assert not lost, (
                    f"{len(lost)} rows of {edge.source} are lost to {edge.target}: {sorted(lost)[:5]}"
                )
                more = {row for row, times in came.items() if times > expected[row]}
                assert (comes_again and edge.source not in once) or not more, (
                    f"{sorted(more)[:5]} of {edge.source} came again to {edge.target}"
                )

    def check_counted(self, plan: Plan, again: Counter[int]) -> None:
        """No more rows are in states twice than operators say that have come ``again``, there or on their
        way there."""
        twice = Counter[int]()
        for edge in plan.graph.edges:
            target = plan.graph.vertices[edge.target]
            states = [self.seen[edge.target, index][1] for index in range(target.parallelism)]
            came = Counter(
                {row[1:]: times for row, times in sum(states, Counter()).items() if row[0] == edge.source}
            )
            more, copies = (came - plan.over(edge)).total(), 1
            if edge.partitioner == "broadcast":
                copies = target.parallelism
            counted = again[edge.target] + copies * twice[edge.source]
            assert more <= counted, (
                f"{more} rows of {edge.source} came twice to {edge.target}, and {counted} were counted"
            )
            twice[edge.target] += 0 if is_side(edge) else more

    def rows_of(self, operator: int) -> int:
        """Rows that its subtasks have received, or sent if they read no others."""
        received = sum(
            len(numbers)
            for receiver, senders in self.received.items()
            if receiver[0] == operator
            for numbers in senders.values()
        )
        return received or sum(sent for sender, sent in self.sent.items() if sender[0] == operator)

    def check_attempts(self, repeated: set[tuple[int, int]]) -> None:
        """A producer serves one attempt of a subtask after the other: what each gets of it lies behind what
        those before got, but between the operators in ``repeated`` (producer and consumer)."""
        highest: dict[tuple[Sender, int, int], int] = {}
        for receiver, senders in sorted(self.received.items()):
            for sender, numbers in senders.items():
                if (sender[0], receiver[0]) in repeated:
                    continue
                key = (sender, *receiver[:2])
                last = highest.get(key, -1)
                assert last < numbers[0], (
                    f"{receiver} received row {numbers[0]} of {sender}, an earlier attempt row {last}"
                )
                highest[key] = numbers[-1]

    def check_once(self, graph: JobGraph, sources: int) -> None:
        """No consumer of a source gets a row twice, in whatever attempts of both, but for what is kept."""
        kept, replayed = graph.kept_edges(), graph.replayed()
        for number, edge in enumerate(graph.edges):
            if edge.source < sources and edge.source not in replayed and number not in kept:
                times = graph.vertices[edge.target].parallelism if edge.partitioner == "broadcast" else 1
                counts = self.came.get((edge.source, edge.target), Counter())
                twice = [row for row, count in counts.items() if count > times]
                assert not twice, f"{twice[:5]} and others of {edge.source} came to {edge.target} again"

    def numbers(self, sender: Sender, operator: int) -> Counter[int]:
        """How often each row of ``sender`` came to subtasks of ``operator``."""
        came: Counter[int] = Counter()
        for receiver, senders in self.received.items():
            if receiver[0] == operator:
                came.update(senders.get(sender, ()))
        return came


AUDITS: dict[int, Audit] = {}
"""By run: programs are pickled and name theirs."""


def padding_of(split: int, at: int) -> bytes:
    """The padding of a row, which is a matter of where it comes from alone."""
    size = PADDING_BYTES[(7 * split + 13 * at) // 3 % len(PADDING_BYTES)]
    return bytes([(31 * split + at) % 251]) * size


# --- programs -------------------------------------------------------------------------------------


class Numbers:
    """A source of rows that say which they are, at its own pace.

    Args:
        first: number of the first split; no two sources have one in common.
        rows: of each split; None: it does not end.
    """

    def __init__(self, first: int, splits: int, rows: int | None, rate: float | None) -> None:
        self._splits = range(first, first + splits)
        self.rows = rows
        self.bounded = rows is not None
        self.rate = rate

    def splits(self) -> list[int]:
        return list(self._splits)

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        at = offset
        while self.rows is None or at < self.rows:
            end = at + 1 + (3 * at + split) % BATCH_ROWS_MAX
            if self.rows is not None:
                end = min(end, self.rows)
            yield [[split, each, 0, 0, 0, 0, padding_of(split, each)] for each in range(at, end)]
            at = end


SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("split", "at", "operator", "index", "attempt", "number")),
        ("padding", pa.binary()),
    ]
)
KEYS = ("split", "at")


def columns_of(rows: list[Any]) -> pa.RecordBatch:
    columns = [
        pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def as_rows(batch: Batch) -> list[Any]:
    payload = batch.payload
    if isinstance(payload, pa.RecordBatch):
        return list(map(list, zip(*(column.to_pylist() for column in payload.columns), strict=True)))
    return list(payload)


class Stage(ChainedOperator):
    """Checks and counts what it receives, and sends it on under its own name, but for the inputs that are
    ``sides``: as rows or, if it is ``columnar``, as Arrow batches, which consumers on the same worker get as
    they are."""

    def __init__(
        self,
        run: int,
        operator: int,
        *,
        first: bool,
        keyed: bool,
        last: bool,
        columnar: bool,
        seconds: float,
        sides: frozenset[int],
        guaranteed: bool,
    ) -> None:
        self._guaranteed = guaranteed
        self._columnar = columnar
        self.name = f"stage{operator}"
        self._sides = sides
        self._seconds = seconds
        self._run = run
        self._operator = operator
        self._first = first
        self._keyed = keyed
        self._last = last

    def open(self, context: TaskContext) -> None:
        self._audit = AUDITS[self._run]
        self._me = (self._operator, context.index, context.attempt)
        self._audit.do_mischief(self._operator, context.index, "raise in open")
        self._time = 0
        self._rows = 0
        self._seen = Counter[tuple[int, int, int]]()

    def state_rows(self) -> int:
        return self._rows

    def write_state(self) -> Iterator[StatePart]:
        if self._guaranteed:
            rows = list(zip(*((*row, times) for row, times in self._seen.items()), strict=True)) or [()] * 4
            columns = dict(zip(("operator", "split", "at", "times"), rows, strict=True))
            yield versioned("rows", {ORDER: range(len(rows[0])), **columns})
            yield versioned("time", {ORDER: [0], "time": [self._time]})
        elif self._rows:
            self._audit.keep(self._me, self._rows)
            yield versioned("rows", {ORDER: [0], "attempt": [self._me[2]], "rows": [self._rows]})

    def read_state(self, parts: Iterable[StatePart]) -> None:
        if self._guaranteed:
            self._audit.begun_from += 1
            for part in in_order(parts):
                rows = part.batch.to_pylist()
                if part.name == "time":
                    self._time = rows[0]["time"]
                else:
                    self._seen.update({(r["operator"], r["split"], r["at"]): r["times"] for r in rows})
            return
        (part,) = in_order(parts)
        attempt, self._rows = part.batch["attempt"][0].as_py(), part.batch["rows"][0].as_py()
        self._audit.restore(self._me, attempt, self._rows)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = as_rows(batch)
        audit, me = self._audit, self._me
        if input in self._sides:
            audit.take_side(me, rows)
        elif not self._first:
            audit.take(me, rows)
            self._rows += len(rows)
        else:
            audit.passed.setdefault(self._operator, set()).update((row[0], row[1]) for row in rows)
        if self._guaranteed:
            self._seen.update((row[2], row[0], row[1]) for row in rows)
        audit.do_mischief(self._operator, me[1], "raise", "stick")
        if input in self._sides:
            return
        if self._seconds:
            audit.sleep(self._seconds * audit.random.random())
        if self._last:
            return
        sent = audit.sent[me]
        audit.sent[me] += len(rows)
        stamped = [[row[0], row[1], *me, sent + number, row[6]] for number, row in enumerate(rows)]
        if self._columnar:
            emit(Batch(columns_of(stamped)))
        else:
            emit(Batch(stamped, [(row[0], row[1]) for row in stamped] if self._keyed else None))
        if self._first:
            self._time += 1
            emit(Watermark(self._time))

    def finish(self, emit: Emit) -> None:
        if self._guaranteed:
            self._audit.note_end(self._me, self._seen)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Watermark) and not self._first:
            self._audit.watermark(self._me, input, mark.time)
        emit(mark)


# --- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A job that was drawn."""

    graph: JobGraph
    bounded: bool
    numbers: list[Numbers]
    """The sources, which are the first operators."""

    @property
    def sources(self) -> int:
        return len(self.numbers)

    @property
    def repeated(self) -> set[tuple[int, int]]:
        """Producers and consumers of the edges whose partitions are kept, or that are replayed."""
        kept, replayed = self.graph.kept_edges(), self.graph.replayed()
        return {
            (edge.source, edge.target)
            for number, edge in enumerate(self.graph.edges)
            if number in kept or edge.source in replayed
        }

    def copies_of(self, operator: int) -> Counter[tuple[int, int]]:
        """How often each row of sources comes to a bounded operator if nothing is lost or repeated."""
        if operator < self.sources:
            return Counter(self.rows_of(operator))
        copies: Counter[tuple[int, int]] = Counter()
        for edge in self.graph.edges:
            if edge.target == operator and not is_side(edge):
                copies.update(self.over(edge))
        return copies

    def over(self, edge: Edge) -> Counter[tuple[int, int]]:
        """The same of an edge that is no side."""
        times = self.graph.vertices[edge.target].parallelism if edge.partitioner == "broadcast" else 1
        return Counter({row: times * count for row, count in self.copies_of(edge.source).items()})

    def rows_of(self, operator: int) -> set[tuple[int, int]]:
        """The rows of sources that come to a bounded operator if nothing is lost."""
        if operator < self.sources:
            source = self.numbers[operator]
            return {(split, at) for split in source.splits() for at in range(source.rows or 0)}
        feeding = [edge for edge in self.graph.edges if edge.target == operator and not is_side(edge)]
        return set().union(*(self.rows_of(edge.source) for edge in feeding))

    @property
    def subtasks(self) -> list[tuple[int, int]]:
        return [
            (operator, index)
            for operator, vertex in enumerate(self.graph.vertices)
            for index in range(vertex.parallelism)
        ]


def is_side(edge: Edge) -> bool:
    """Whether what it carries goes no further."""
    return edge.partitioner == "broadcast" and edge.input > 0


def make_plan(
    random: Random,
    run: int,
    strategy: Strategy,
    bounded_share: float,
    *,
    side: bool = False,
    blocking: bool = False,
    guaranteed: bool = False,
) -> Plan:
    """Draw a job: one or two sources, then one to three stages, each fed by the one before or by more.

    Args:
        run: whose audit the rows go to.
        bounded_share: of the jobs, those that come to an end by themselves.
        side: the second source is bounded, and goes to all subtasks of the stage that the first one feeds,
            directly or by a stage in between.
        blocking: some edges that end are, at least one if any does.
        guaranteed: nothing may be lost, and all sources come to an end, also those that do not say so.
    """
    sources, stages = 2 if side else random.randint(1, 2), random.randint(1, 3)
    parallelism = [random.randint(1, 4) for _ in range(sources + stages)]
    bounded = random.random() < bounded_share
    draw = _draw_edges_with_side if side else _draw_edges
    edges = draw(random, sources, parallelism)
    if guaranteed and not bounded:  # What does not say that it ends is no side.
        edges = [edge.model_copy(update={"input": 0}) if is_side(edge) else edge for edge in edges]
    on_side = {edge.source for edge in edges if side and is_side(edge)}
    on_side |= {edge.source for edge in edges if edge.target in on_side}
    later = Random(f"{parallelism} {edges}")  # draws of its own: each seed's job stays what it was
    if blocking:
        _store(later, edges, [n for n, edge in enumerate(edges) if bounded or edge.source in on_side])
    vertices, numbers = [], []
    for operator, subtasks in enumerate(parallelism):
        ends = bounded or operator in on_side
        outputs = _outputs(operator, edges)
        stage = Stage(
            run,
            operator,
            first=operator < sources,
            keyed=any(output.partitioner == "hash" for output in outputs),
            last=not outputs,
            columnar=later.random() < 0.5,
            seconds=random.choice(SLOW_SECONDS),
            sides=_sides(operator, [e for e in edges if bounded or e.source in on_side]),
            guaranteed=guaranteed,
        )
        source = _draw_source(random, operator, ends) if operator < sources else None
        if source is not None and operator in on_side:
            source.rate = random.choice([None, 50.0, 200.0])  # slow ones are cut off in the middle
        if source is not None and guaranteed:
            source.rows, source.rate = later.randint(0, SPLIT_ROWS_MAX), later.choice(GUARANTEED_RATES)
        numbers += [source] if source is not None else []
        vertices.append(_vertex(operator, subtasks, source, stage, outputs, ends=ends))
    settings = _draw_schedule(later, _draw_settings(random, later, strategy), blocking=blocking)
    if guaranteed:
        settings = settings.model_copy(update=_draw_guarantee(later, f"{parallelism} {edges}"))
        vertices = _draw_order(Random(f"order of {parallelism} {edges}"), vertices)
    graph = JobGraph(vertices=vertices, edges=edges, settings=settings)
    return Plan(graph, bounded or guaranteed, numbers)


def _vertex(
    operator: int, subtasks: int, source: Any, stage: Stage, outputs: Sequence[Output], *, ends: bool
) -> Vertex:
    return Vertex(
        name=f"v{operator}",
        parallelism=subtasks,
        operators=[stage.name],
        is_source=source is not None,
        bounded=ends,
        program=pack_program(_program(source, stage, outputs), cloudpickle.dumps),
    )


def _draw_order(random: Random, vertices: list[Vertex]) -> list[Vertex]:
    """Whether the plan knows that they give the same rows in the same order, as all of them do."""
    return [
        vertex.model_copy(
            update={
                "by_order": random.random() < 0.7,
                "in_turn": vertex.is_source and not vertex.bounded and random.random() < 0.5,
            }
        )
        for vertex in vertices
    ]


def _program(source: Any, stage: Stage, outputs: Sequence[Output]) -> ProgramSpec:
    operator = OperatorSpec("sink", {"sink": stage}, id=stage.name)
    return ProgramSpec(source, [(stage.name, operator)], outputs)


def _draw_settings(random: Random, later: Random, strategy: Strategy) -> JobSettings:
    return JobSettings(
        buffers_per_channel=random.randint(1, 3),
        floating_buffers_per_gate=random.randint(1, 6),
        buffer_timeout=random.choice(["adaptive", "adaptive", 0, -1, 0.01]),
        restart_strategy=strategy,
        on_unavailable=random.choice([None, "drop", "wait"]),
        latency_interval=random.choice([0.0, 0.0, 0.001]),
        debloat_target=later.choice([0.0, 0.0, 0.001, 1.0]),
        flow_control=later.choice(["credit", "credit", "tcp"]),
    )


def _draw_schedule(random: Random, settings: JobSettings, *, blocking: bool) -> JobSettings:
    chosen = ["eager", "stages", "stages"] if blocking else ["eager", "eager"]
    schedule = random.choice([*chosen, "first_output"])
    start_when = None if schedule == "eager" else random.choice(["any", "all"])
    return settings.model_copy(update={"schedule": schedule, "start_when": start_when})


def _draw_guarantee(random: Random, job: str) -> dict[str, Any]:
    return {
        **_draw_beginning(Random(f"beginning of {job}")),
        "guarantee": "at_least_once",
        "snapshot_interval": random.choice([0.01, 0.05, 0.2, 1.0]),
        "snapshot_cost_max": random.choice([0.03, 1.0]),
        "durable_interval": random.choice([0.1, 0.5, 30.0]),
        "on_unavailable": None,
        "flow_control": "credit",
    }


def _draw_beginning(random: Random) -> dict[str, Any]:
    """Whether the consumers of a job with a guarantee are deployed at the first output of their producers."""
    if random.random() < 0.6:
        return {"schedule": "eager", "start_when": None}
    return {"schedule": "first_output", "start_when": random.choice(["any", "all"])}


def _store(random: Random, edges: list[Edge], ending: list[int]) -> None:
    """One or two of those that are ``ending`` become blocking."""
    for number in random.sample(ending, min(len(ending), random.randint(1, 2))):
        edges[number] = edges[number].model_copy(update={"kind": "blocking"})


def _sides(operator: int, edges: list[Edge]) -> frozenset[int]:
    return frozenset(edge.input for edge in edges if edge.target == operator and is_side(edge))


def _outputs(operator: int, edges: list[Edge]) -> list[Output]:
    return [Output(n, edge.partitioner, KEYS) for n, edge in enumerate(edges) if edge.source == operator]


def _draw_edges(random: Random, sources: int, parallelism: list[int]) -> list[Edge]:
    edges: list[Edge] = []
    for target in range(sources, len(parallelism)):
        feeding = list(range(sources)) if target == sources else [target - 1]
        if target > sources and random.random() < 0.2:
            feeding.append(random.randrange(target - 1))
        apart = random.random() < 0.5
        for number, source in enumerate(feeding):
            kind: Any = random.choice(KINDS)
            if parallelism[source] == parallelism[target] and random.random() < 0.2:
                kind = "forward"
            edges.append(Edge(source=source, target=target, input=number if apart else 0, partitioner=kind))
    return edges


def _draw_edges_with_side(random: Random, sources: int, parallelism: list[int]) -> list[Edge]:
    """The first stage, if there are more, may stand between the side's source and the others."""
    between = len(parallelism) > sources + 1 and random.random() < 0.5
    side, join = (sources, sources + 1) if between else (sources - 1, sources)
    kind: Any = random.choice(["hash", "broadcast"])
    edges = [Edge(source=sources - 1, target=side, partitioner=kind)] if between else []
    kind = random.choice(["hash", "rebalance"])
    edges.append(Edge(source=0, target=join, partitioner=kind))
    edges.append(Edge(source=side, target=join, input=1, partitioner="broadcast"))
    for target in range(join + 1, len(parallelism)):
        edges.append(Edge(source=target - 1, target=target, partitioner=kind))
    return edges


def _draw_source(random: Random, operator: int, bounded: bool) -> Numbers:
    return Numbers(
        operator * SPLITS_MAX,
        random.randint(1, SPLITS_MAX),
        random.randint(0, SPLIT_ROWS_MAX) if bounded else None,
        random.choice([None, 100.0, 300.0]) if bounded else random.choice([100.0, 300.0]),
    )
