"""The state of a task that moves, from the attempt that ends to the one that begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.counters import TaskCounters
from minishuffle.errors import PartitionLost, PeerLost, ShuffleError, TaskCancelled
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.blocking import BlockingPartition
from minishuffle.exchange.elements import ELEMENT_HEADER, AssemblyBudget, read_header
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.rownumbers import ChannelRows
from minishuffle.ids import JobId, PartitionId, state_edge
from minishuffle.operators.base import BEGINNING_OF_TIME, Emit, Program, TaskContext
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.state_parts import ORDER, StatePart, by_rows, in_order, keys_of, versioned
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.packed import Cursor, SplitPosition
from minishuffle.worker.tasks.handoff import TaskPaths
from minishuffle.worker.tasks.statehandover import (
    SILENCE_SECONDS_MAX,
    StateHandover,
    StateInput,
    pack_state,
    unpack_state,
)

INDEX = 1
ID = PartitionId(JobId("j1"), state_edge(3), INDEX)
SEGMENT_BYTES = 64


class Paths:
    """A task thread that does the work of its loop whenever it waits."""

    def __init__(self) -> None:
        self.posted: deque[Callable[[], Any]] = deque()
        self.bell = self
        self.now = 0.0
        self.cancelled = False

    def ring(self) -> None:
        """It looks anyway."""

    clear = ring

    def post(self, call: Callable[..., None], *args: Any) -> None:
        self.posted.append(lambda: call(*args))

    def give_back(self, buffer: Any) -> None:
        self.posted.append(lambda: buffer.attachment.consumed(buffer))

    def check(self) -> None:
        if self.cancelled:
            raise TaskCancelled("the task was cancelled")

    def wait(self, seconds: float) -> None:
        self.now += 0.0 if self.posted else seconds
        self.run()

    def run(self) -> None:
        while self.posted:
            self.posted.popleft()()


class NoDisk:
    """All is in memory."""

    def run(self, read: Callable[[], Any], done: Callable[[Any], None]) -> None:
        done(read())


class Rows(ChainedOperator):
    """Keeps rows."""

    def __init__(self, id: str = "rows") -> None:
        self.name, self.id, self.rows = id, id, list[Any]()

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self.rows += batch.payload

    def state_rows(self) -> int:
        return len(self.rows)

    def write_state(self) -> Iterator[StatePart]:
        if self.rows:
            yield by_rows("rows", self.rows, **{ORDER: pa.array(range(len(self.rows)))})

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in in_order(parts):
            self.rows += keys_of(part)


class Held(Rows):
    """Cannot write them."""

    def write_state(self) -> Iterator[StatePart]:
        return iter(())


class Broken(Rows):
    def write_state(self) -> Iterator[StatePart]:
        raise ValueError("a lock cannot be pickled")


def chain_of(*operators: Rows) -> Chain:
    chain = Chain(Program(None, list(operators), []), {}, INDEX, TaskCounters())
    context = TaskContext(job="j1", name="rows", index=INDEX, parallelism=2, attempt=1)
    chain.open(context for _ in operators)
    return chain


def store() -> ElementStore:
    return ElementStore("state", StorePlace(), memory_bytes=1 << 20)


def partition() -> BlockingPartition:
    return BlockingPartition(
        ID,
        range(INDEX, INDEX + 1),
        lambda subpartition: None,
        TaskCounters(),
        store(),
        shared=False,
        capacity=SEGMENT_BYTES,
        disk=NoDisk(),
    )


class Bench:
    """An attempt that begins, and the state of another."""

    def __init__(self) -> None:
        self.paths = Paths()
        paths = cast(TaskPaths, self.paths)
        self.input = StateInput(
            ID,
            paths,
            AssemblyBudget(1 << 20),
            segment_bytes=SEGMENT_BYTES,
            store=store(),
            on_event=lambda generation, event: None,
            clock=lambda: self.paths.now,
        )
        self.rows = Rows()
        self.chain = chain_of(self.rows)
        self.closed = 0
        self.handover = StateHandover(paths, partition, self.input, self._close)

    def _close(self) -> None:
        self.closed += 1

    def attach(self, kept: BlockingPartition, generation: int = 1) -> None:
        self.input.channel.attach_local(kept.subpartitions[0], generation, lambda piece: None, attempt=2)

    def take_over(self) -> None:
        self.handover.take_over(self.chain)
        self.paths.run()


def kept(rows: list[Any]) -> BlockingPartition:
    """What an attempt with these rows keeps."""
    handover = StateHandover(cast(TaskPaths, Paths()), partition)
    operator = Rows()
    chain = chain_of(operator)
    operator.rows += rows
    handover.hand_on(chain)
    assert handover.moved and handover.kept is not None and handover.bytes
    return handover.kept


# --- elements ---------------------------------------------------------------------------------------------


PARTS = st.builds(
    lambda name, values: versioned(name, {ORDER: list(range(len(values))), "value": values}),
    st.sampled_from(["open", "window", "é"]),
    st.lists(st.one_of(st.text(), st.none()), min_size=1, max_size=20),
)


EDGES = st.integers(0, 1 << 31)
COUNTS = st.integers(0, (1 << 64) - 1)
CURSORS = st.builds(Cursor, st.text(max_size=9), st.binary(max_size=9), COUNTS)
COUNTED = st.fixed_dictionaries(
    {},
    optional={
        "positions": st.lists(
            st.builds(SplitPosition, EDGES, COUNTS, st.just(0), st.booleans(), st.none() | CURSORS)
        ),
        "watermark": st.sampled_from([BEGINNING_OF_TIME, -1, 0, 1 << 60]),
        "taken": st.dictionaries(
            EDGES, st.lists(st.builds(ChannelRows, EDGES, EDGES, COUNTS, st.booleans()), max_size=3)
        ),
        "written": st.dictionaries(EDGES, st.lists(COUNTS, max_size=3)),
        "dealt": st.dictionaries(EDGES, COUNTS),
        "collected": COUNTS,
        "at": st.floats(0, 1e10),
        "left_out": st.lists(EDGES, max_size=3).map(tuple),
        "pending": st.binary(max_size=9),
        "again": COUNTS,
    },
)


@given(st.dictionaries(st.sampled_from(["count", "join"]), st.lists(PARTS, min_size=1, max_size=3)), COUNTED)
def test_a_snapshot_is_the_same_behind_its_elements(
    parts: dict[str, list[StatePart]], counted: dict[str, Any]
) -> None:
    snapshot = TaskStateSnapshot(parts, **counted)
    elements = list(pack_state(snapshot))
    assert bool(elements) == (snapshot != TaskStateSnapshot())
    payloads = [memoryview(b"".join(each))[ELEMENT_HEADER.size :] for each in elements]
    found = unpack_state(iter(payloads))
    expected = TaskStateSnapshot(**counted)
    assert list(found.positions) == list(expected.positions)
    assert replace(found, parts={}, positions=()) == replace(expected, positions=())
    assert found.parts.keys() == parts.keys()
    for operator, wanted in parts.items():
        for one, other in zip(found.parts[operator], wanted, strict=True):
            assert one.name == other.name and one.batch.equals(other.batch, check_metadata=True)


def test_a_long_part_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minishuffle.worker.tasks.statehandover.BATCH_BYTES_MAX", 64)
    part = versioned("rows", {ORDER: list(range(100))})
    elements = [b"".join(each) for each in pack_state(TaskStateSnapshot({"rows": [part]}))]
    assert [read_header(each)[1] for each in elements] == [1] * (1 + 13)  # of eight rows, the last of four
    found = unpack_state(memoryview(each)[ELEMENT_HEADER.size :] for each in elements)
    assert [each.batch.num_rows for each in found.parts["rows"]] == [8] * 12 + [4]


# --- both sides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 500])
def test_the_next_attempt_goes_on_with_what_the_last_one_kept(count: int) -> None:
    rows = [("key", number) for number in range(count)]
    bench = Bench()
    bench.attach(kept(rows))
    bench.take_over()
    assert bench.rows.rows == rows and not bench.handover.lost
    assert (bench.handover.earlier, bench.closed) == (None, 1), "its memory is free"


def test_a_link_that_breaks_is_waited_for_and_all_is_read_once() -> None:
    rows = [("key", number) for number in range(500)]
    state, bench = kept(rows), Bench()
    bench.attach(state)
    bench.input.channel.fail(1, PeerLost("reset by peer"))
    bench.paths.post(lambda: bench.attach(state, 2))
    bench.take_over()
    assert bench.rows.rows == rows and not bench.handover.lost


@pytest.mark.parametrize(
    "error", [PartitionLost("block 3 cannot be read"), PartitionLost("worker 1 was declared lost")]
)
def test_without_all_of_it_an_attempt_begins_with_nothing(error: ShuffleError) -> None:
    bench = Bench()
    bench.attach(kept([("key", number) for number in range(500)]))
    bench.input.channel.fail(1, error)
    bench.take_over()
    assert bench.rows.rows == [] and bench.handover.lost == f"PartitionLost: {error}"


def test_an_attempt_that_nobody_gives_state_begins_without_it_in_the_end() -> None:
    bench = Bench()
    bench.take_over()
    assert "nothing of it has come" in bench.handover.lost
    assert SILENCE_SECONDS_MAX < bench.paths.now < SILENCE_SECONDS_MAX + 5.0


def test_an_attempt_that_is_cancelled_meanwhile_reads_no_further() -> None:
    bench = Bench()
    bench.paths.post(lambda: setattr(bench.paths, "cancelled", True))
    with pytest.raises(TaskCancelled):
        bench.take_over()


def test_an_attempt_that_no_other_precedes_reads_nothing() -> None:
    handover = StateHandover(cast(TaskPaths, Paths()), partition)
    handover.take_over(chain_of(Rows()))
    assert not handover.lost


# --- what cannot be kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "why"),
    [
        (Broken(), "ValueError: a lock cannot be pickled"),
        (Held("side"), "ResourceExhausted: what side holds cannot be taken along"),
    ],
    ids=["raises", "held"],
)
def test_a_task_moves_without_state_that_cannot_be_kept(operator: Rows, why: str) -> None:
    handover = StateHandover(cast(TaskPaths, Paths()), partition)
    chain = chain_of(operator)
    operator.rows += [("key", 1)]
    handover.hand_on(chain)
    assert (handover.moved, handover.kept, handover.lost) == (False, None, why)


def test_a_task_without_state_moves_with_nothing() -> None:
    handover = StateHandover(cast(TaskPaths, Paths()), partition)
    handover.hand_on(chain_of(Rows()))
    assert (handover.moved, handover.kept, handover.bytes, handover.lost) == (True, None, 0, "")


def test_a_task_that_goes_on_itself_keeps_nothing() -> None:
    handover = StateHandover(cast(TaskPaths, Paths()), partition)
    operator = Rows()
    chain = chain_of(operator)
    operator.rows += [("key", 1)]
    handover.hand_on(chain)
    state = handover.kept
    handover.go_on()
    assert (handover.moved, handover.kept) == (False, None)
    assert state is not None and state.subpartitions[0].error is not None


def test_a_task_that_is_cancelled_as_it_writes_has_not_moved() -> None:
    paths = Paths()
    handover = StateHandover(cast(TaskPaths, paths), partition)
    operator = Rows()
    chain = chain_of(operator)
    operator.rows += [("key", 1)]
    paths.cancelled = True
    with pytest.raises(TaskCancelled):
        handover.hand_on(chain)
    assert not handover.moved
