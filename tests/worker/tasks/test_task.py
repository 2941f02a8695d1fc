"""The task thread: whole jobs inside one worker, and every way in which a task can end."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import TaskCancelled, TaskFailed, UnserializableRecord
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.rows import unpack_result
from minishuffle.operators.base import TaskContext
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.programs import ProgramSpec, pack_program
from minishuffle.runtime.usererrors import PACKAGE
from minishuffle.wire.messages import ErrorInfo, WriteState
from minishuffle.worker.tasks import task as task_module
from minishuffle.worker.tasks.handoff import TaskPaths
from minishuffle.worker.tasks.lateparts import LateParts
from minishuffle.worker.tasks.task import TaskOutcome
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Site

TEXT = ["to be or not to be", "that is the question", "", "to die to sleep no more"] * 50
HERE = Path(__file__).name
CLOSED: list[str] = []
"""What sinks of the tests have closed."""


def broken(row: Any) -> Any:
    return {}[row]


def broken_because_of_another(row: Any) -> Any:
    try:
        broken(row)
    except KeyError as error:
        raise ValueError(f"no such row: {row}") from error


def leaves(row: Any) -> Any:
    raise SystemExit(3)


def waits_for_a_job(row: Any) -> Any:
    raise TaskCancelled("job j7 (count) was cancelled")


SECONDS_MAX = 20.0


class OneByOne:
    """Rows that are far smaller than a segment, each after the one before was taken."""

    ROWS = 50
    taken = threading.Semaphore(0)

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        for row in range(self.ROWS):
            yield [row]
            assert self.taken.acquire(timeout=SECONDS_MAX)

    @classmethod
    def take(cls, row: Any) -> Any:
        cls.taken.release()
        return row


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nothing to say")


def unspeakable(row: Any) -> Any:
    raise Unspeakable


def too_long(row: Any) -> Any:
    raise ValueError("x" * 10_000_000)


class RecordingSink:
    """Notes its close."""

    def open(self, context: TaskContext) -> None:
        """Nothing to open."""

    def write(self, batch: Batch) -> None:
        """Nothing to keep."""

    def close(self) -> None:
        CLOSED.append("sink")


class Endless:
    """Batches for ever, as fast as they are taken."""

    bounded = False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        while True:
            yield ["row" * 20] * 50


class Silent:
    """A source that is alive and has nothing."""

    bounded = False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        while True:
            yield []


class Held:
    """A place in user code where a task is held until the test lets it go."""

    everywhere: dict[str, Held] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached, self.let_go = threading.Event(), threading.Event()

    @classmethod
    def of(cls, name: str) -> Held:
        cls.everywhere[name] = cls(name)
        return cls.everywhere[name]


def hold_and_raise(name: str) -> Any:
    held = Held.everywhere[name]
    held.reached.set()
    assert held.let_go.wait(20.0)
    raise RuntimeError("let go")


@pytest.fixture(autouse=True)
def _forget_closed() -> None:
    CLOSED.clear()


def error_of(outcome: TaskOutcome) -> ErrorInfo:
    assert outcome.state == "failed"
    assert outcome.error is not None
    return outcome.error


async def failure(site: Site, stream: Stream[Any]) -> ErrorInfo:
    (outcome,) = await site.run(stream)
    return error_of(outcome)


# --- jobs that go well ----------------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [1, 3])
async def test_word_count_equals_a_counter(site: Site, parallelism: int) -> None:
    words = Stream.items(TEXT).flat_map(str.split)
    counts = words.key_by(lambda word: word).count()
    outcomes = await site.run(counts.collect(), parallelism=parallelism)
    assert [outcome.state for outcome in outcomes] == ["finished"] * 2 * parallelism
    assert dict(site.rows) == Counter(" ".join(TEXT).split())
    assert len(site.rows) == len(dict(site.rows))


async def test_elements_longer_than_a_segment_and_tight_memory(site_of: type[Site]) -> None:
    site = site_of(segments=12, segment_bytes=256)
    rows = [f"{number:04d}" + "-" * (number % 997) for number in range(3000)]
    outcomes = await site.run(Stream.items(rows).rebalance().collect())
    assert [outcome.state for outcome in outcomes] == ["finished", "finished"]
    assert site.rows == rows
    producer = site.deployment.attempts[attempt(0)].counters
    assert producer.records_out == 3000
    await site.close()
    assert site.pool.free == 12


async def test_two_inputs_are_both_read_to_their_end(site: Site) -> None:
    left, right = Stream.items(range(1000)), Stream.items(range(1000, 1500)).map(lambda n: n)
    await site.run(left.union(right).rebalance().collect(), parallelism=2)
    assert sorted(site.rows) == list(range(1500))


async def test_broadcast_reaches_every_consumer(site: Site) -> None:
    outcomes = await site.run(Stream.items([1, 2, 3]).broadcast().to_count(), parallelism=2)
    assert [msgpack.unpackb(outcome.result) for outcome in outcomes if outcome.result] == [3, 3]


async def test_a_sinks_result_is_the_outcomes(site: Site) -> None:
    source, sink = await site.run(Stream.items(range(77)).rebalance().to_count())
    assert (source.state, source.result) == ("finished", b"")
    assert sink == TaskOutcome("finished", result=msgpack.packb(77))


async def test_tasks_say_that_they_run_before_they_say_how_they_ended(site: Site) -> None:
    await site.run(Stream.items([1]).rebalance().to_count())
    for key in site.deployment.attempts:
        said = [outcome.state if outcome else "running" for which, outcome in site.reports if which == key]
        assert said == ["running", "finished"]


async def test_counters_of_producer_and_consumer_agree(site: Site) -> None:
    await site.run(Stream.items(range(5000)).rebalance().to_count())
    producer, consumer = (task.read_counters() for task in site.tasks())
    assert producer.records_in == 0, "what a source makes is no input"
    assert producer.records_out == consumer.records_in == 5000
    assert producer.bytes_out == consumer.bytes_in == site.deployment.local_bytes
    assert consumer.buffers_in == site.deployment.local_buffers
    assert site.deployment.local_rows == 5000
    assert producer.first_output_at > 0.0
    assert consumer.last_input_at >= producer.first_output_at


async def test_buffers_out_and_in_are_the_same_unit(site: Site) -> None:
    """A segment may go out in many pieces, each with what one element added to it."""
    stream = Stream.source(OneByOne()).rebalance().map(OneByOne.take)
    await site.run(stream.to_count(), settings=JobSettings(buffer_timeout=0))
    producer, consumer = (task.read_counters() for task in site.tasks())
    assert producer.buffers_out == consumer.buffers_in == site.deployment.local_buffers == OneByOne.ROWS
    assert producer.records_out == consumer.records_in == OneByOne.ROWS


async def test_a_source_that_ends_in_a_sink_counts_what_it_made_as_out(site: Site) -> None:
    await site.run(Stream.items(range(9)).filter(lambda row: row % 3).to_count())
    (task,) = site.tasks()
    counters = task.read_counters()
    assert (counters.records_in, counters.records_out) == (0, 9)
    found = [(each.name, each.records_in, each.records_out) for each in task.operators]
    assert found == [("items", 0, 9), ("filter", 9, 6), ("to_count", 6, 0)]


@pytest.mark.parametrize(("buffer_timeout", "rests"), [("adaptive", 2), (0.1, 0)])
async def test_a_source_rests_between_two_reads_unless_its_rows_have_a_time(
    site: Site, monkeypatch: pytest.MonkeyPatch, buffer_timeout: Any, rests: int
) -> None:
    rested: list[float] = []
    monkeypatch.setattr(TaskPaths, "rest", lambda self, seconds: rested.append(seconds))
    monkeypatch.setattr(task_module, "SourceRest", AlwaysRests)
    stream = Stream.source(TwoBatches()).rebalance().to_count()
    await site.run(stream, settings=JobSettings(buffer_timeout=buffer_timeout))
    assert rested == [0.01] * rests


class TwoBatches:
    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        yield [1]
        yield [2, 3]


class AlwaysRests:
    seconds = 0.01

    def __init__(self, now: float, waited: float, consumers: int) -> None:
        """The same at any time."""

    def read(self, rows: int, now: float) -> bool:
        return True

    def look(self, now: float, waited: float) -> None:
        """Nothing to decide."""


async def test_printed_rows_become_log_lines(site: Site) -> None:
    await site.run(Stream.items([1, "two"]).print())
    assert site.lines == ["1", "'two'"]


async def test_rows_that_cannot_be_collected_are_dropped_if_their_function_says_so(site: Site) -> None:
    """Sets are no rows."""
    (task,) = site.deploy(Stream.items([1, 2, 3, 4]).map(set_of_even, on_error="dead_letter").collect())
    assert [outcome.state for outcome in await site.finish()] == ["finished"]
    assert sorted(site.rows) == [1, 3]
    assert task.counters.user_errors == {"dead_letter": 2}
    assert all(line.startswith("dead letter: map: UnserializableRecord: ") for line in site.lines)


def set_of_even(number: int) -> Any:
    return number if number % 2 else {number}


LINES = [{"text": f"row {number}"} for number in range(500)]


@pytest.mark.parametrize("stream", [Stream.items(LINES), Table.from_arrow(pa.Table.from_pylist(LINES))])
async def test_what_is_collected_is_cut_to_what_a_message_takes(
    site: Site, monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    monkeypatch.setattr(task_module, "MESSAGE_BYTES_MAX", 1000)
    await site.run(stream.collect())
    assert site.rows == LINES
    assert site.batches > 4


# --- jobs that fail -------------------------------------------------------------------------------------


async def test_a_function_that_raises_fails_its_task_with_the_users_frames_only(site: Site) -> None:
    error = await failure(site, Stream.items(["lost"]).map(broken).collect())
    assert error.code == TaskFailed.code
    assert error.text.endswith("[0]: KeyError: 'lost'")
    assert error.text.startswith(error.task)
    assert "in broken" in error.traceback
    assert HERE in error.traceback
    assert "raised in operator 'map' by the record 'lost'" in error.traceback
    assert str(PACKAGE) not in error.traceback


async def test_the_cause_of_an_error_is_shown_without_the_runtimes_frames_too(site: Site) -> None:
    error = await failure(site, Stream.items(["lost"]).map(broken_because_of_another).collect())
    assert "ValueError: no such row: lost" in error.text
    first, second = error.traceback.split("direct cause")
    assert "KeyError: 'lost'" in first
    assert "in broken_because_of_another" in second
    assert str(PACKAGE) not in error.traceback


async def test_system_exit_ends_its_task_alone(site: Site) -> None:
    other = site.deploy(Stream.source(Endless()).rebalance().to_count(), "other")
    error = await failure(site, Stream.items([1]).map(leaves).collect())
    assert error.text.endswith("SystemExit: 3")
    seen = other[1].counters.records_in
    await site.until(lambda: other[1].counters.records_in > seen)
    assert {task.state for task in other} == {"running"}


async def test_a_function_that_hears_of_another_jobs_cancellation_fails_and_says_where(site: Site) -> None:
    error = await failure(site, Stream.items([1]).map(waits_for_a_job).collect())
    assert error.code == TaskFailed.code
    assert error.text.endswith("TaskCancelled: job j7 (count) was cancelled")
    assert "in waits_for_a_job" in error.traceback


async def test_an_error_that_cannot_say_what_it_is_ends_its_task_all_the_same(site: Site) -> None:
    error = await failure(site, Stream.items([1]).map(unspeakable).collect())
    assert "Unspeakable: (its text cannot be had: __str__ raised RuntimeError)" in error.text
    assert "in unspeakable" in error.traceback


async def test_a_very_long_error_is_cut(site: Site) -> None:
    error = await failure(site, Stream.items([1]).map(too_long).collect())
    assert "ValueError: xxx" in error.text
    assert "in too_long" in error.traceback
    assert len(error.text) + len(error.traceback) < 40_000


async def test_an_error_of_the_runtime_has_no_traceback(site: Site) -> None:
    error = await failure(site, Stream.items([1]).map(lambda row: {1: object()}).collect())
    assert error.code == UnserializableRecord.code
    assert error.traceback == ""


async def test_a_program_that_cannot_be_opened_fails_its_task(site: Site) -> None:
    message = site.message(compiled_elsewhere(), "j1")
    (spec,) = message.tasks
    program = pack_program(ProgramSpec(), lambda objects: b"not a pickle")
    site.deployment.start(start_task(message, program))
    (outcome,) = await site.finish()
    assert error_of(outcome).task == f"{spec.name}[0]"
    assert "UnpicklingError" in error_of(outcome).text


def compiled_elsewhere() -> Any:
    from minishuffle.plan.planner import compile_job

    return compile_job(Stream.items([1]).collect())


def start_task(message: Any, program: bytes) -> Any:
    from minishuffle.worker.instructions import StartTask

    return StartTask(message.model_copy(update={"programs": {0: program}}), message.tasks[0])


async def test_a_failed_consumer_leaves_its_producer_to_be_cancelled(site: Site) -> None:
    source, consumer = site.deploy(Stream.source(Endless()).rebalance().map(broken).collect())
    await site.until(lambda: len(site.outcomes) == 1)
    assert consumer.state == "failed"
    source.paths.cancel()
    first, _ = await site.finish()
    assert first.state == "canceled"


# --- cancel ---------------------------------------------------------------------------------------------


async def test_cancel_ends_a_busy_source_and_its_consumer(site: Site) -> None:
    tasks = site.deploy(Stream.source(Endless()).rebalance().to(RecordingSink()))
    await site.until(lambda: tasks[1].counters.records_in > 1000)
    for task in tasks:
        task.paths.cancel()
    outcomes = await site.finish()
    assert [(outcome.state, outcome.result) for outcome in outcomes] == [("canceled", b"")] * 2
    assert CLOSED == ["sink"]


async def test_what_a_sink_gives_at_its_close_survives_a_cancel(site: Site) -> None:
    tasks = site.deploy(Stream.source(Endless()).rebalance().to_count())
    await site.until(lambda: tasks[1].counters.records_in > 1000)
    for task in tasks:
        task.paths.cancel()
    _, sink = await site.finish()
    assert (sink.state, unpack_result(sink.result)) == ("canceled", tasks[1].counters.records_in)


async def test_cancel_ends_a_source_that_has_nothing(site: Site) -> None:
    (task,) = site.deploy(Stream.source(Silent()).collect())
    await site.until(lambda: task.state == "running")
    task.paths.cancel()
    assert [outcome.state for outcome in await site.finish()] == ["canceled"]


async def test_cancel_ends_tasks_that_wait_for_a_segment_and_for_input(site: Site) -> None:
    """Case 139, SingleInputGateTest."""
    settings = JobSettings(buffer_timeout=-1)
    stream = Stream.source(Endless()).rebalance().to_count()
    source, sink = site.deploy(stream, settings=settings, connect=False)
    snapshot = site.deployment.snapshots
    await site.until(
        lambda: snapshot()[0].partitions[0].pool.used == snapshot()[0].partitions[0].pool.capacity
    )
    await site.until(lambda: sink.state == "running")
    for task in (source, sink):
        task.paths.cancel()
    assert [(outcome.state, outcome.error) for outcome in await site.finish()] == [("canceled", None)] * 2
    assert sink.counters.records_in == 0


async def test_what_a_cancelled_function_raises_is_no_failure(site: Site) -> None:
    held = Held.of("raises when it is let go")
    (task,) = site.deploy(Stream.items([held.name]).map(hold_and_raise).collect())
    await site.until(held.reached.is_set)
    task.paths.cancel()
    held.let_go.set()
    (outcome,) = await site.finish()
    assert outcome.state == "canceled"
    assert outcome.error is not None and "RuntimeError: let go" in outcome.error.text


class Counting:
    """Numbers for ever, as fast as they are taken."""

    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        while True:
            yield list(range(offset, offset + 50))
            offset += 50


async def test_state_is_taken_at_a_barrier_that_passes_and_written_while_rows_go_on(site: Site) -> None:
    numbers = Stream.source(Counting()).key_by(lambda row: row % 10_000).count().to_count()
    tasks = site.deploy(numbers, parallelism=2)
    attempts, counts = site.deployment.attempts, [attempt(1, 0), attempt(1, 1)]
    await site.until(lambda: all(attempts[key].task.counters.records_in > 10_000 for key in counts))
    site.pass_barrier()
    sources = [attempt(0, 0), attempt(0, 1)]
    await site.until(lambda: site.made.keys() >= {*counts} and site.saved.keys() >= {*sources})
    rows = sum(each.position for index in (0, 1) for each in site.saved[attempt(0, index)].positions)
    made = [part.batch for key in counts for parts in site.made[key].parts.values() for part in parts]
    assert sum(sum(batch.column("value").to_pylist()) for batch in made) == rows
    assert len(made) > len(counts), "an element may come between each two"
    at = [task.counters.records_in for task in tasks[2:]]
    await site.until(lambda: all(task.counters.records_in > n for task, n in zip(tasks[2:], at, strict=True)))
    for task in tasks:
        task.paths.cancel()
    await site.finish()


async def test_a_task_that_is_to_stand_makes_the_rest_of_its_state_first(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateParts, "go_on", lambda late: math.inf)
    tasks = site.deploy(Stream.source(Counting()).key_by(lambda row: row % 1_000).count().to_count())
    attempts, count = site.deployment.attempts, attempt(1)
    await site.until(lambda: attempts[count].task.counters.records_in > 1_000)
    for there in attempts.values():
        there.paths.pause.save(
            WriteState(term=1, job="j1", savepoint=1, barrier=1, folder="/s", goes_on=True)
        )
        there.paths.bell.ring()
    await site.until(lambda: count in site.saved)
    assert count not in site.made
    for there in attempts.values():
        there.set_pause(2, paused=True)
    await site.until(lambda: attempts[count].paths.pause.at == 2 and count in site.made)
    for task in tasks:
        task.paths.cancel()
    await site.finish()
