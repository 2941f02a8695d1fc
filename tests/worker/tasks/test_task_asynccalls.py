"""Asynchronous functions in tasks: on a loop of their own, at the same time, and gone with the task."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.errors import UsageError, WrongResult
from minishuffle.operators.base import TaskContext
from minishuffle.plan.planner import compile_job
from minishuffle.wire.messages import PoisonSearch
from minishuffle.worker.instructions import StartTask

if TYPE_CHECKING:
    from .conftest import Site

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


def loops() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith(" calls")]


class Meeting:
    """Calls of which each waits for the one behind it: only if all are under way does any end."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    async def open(self, context: TaskContext) -> None:
        self.came = [asyncio.Event() for _ in range(self.rows + 1)]
        self.came[self.rows].set()
        SEEN.append(threading.current_thread())

    async def __call__(self, row: int) -> int:
        self.came[row].set()
        await self.came[row + 1].wait()
        return 10 * row

    async def close(self) -> None:
        SEEN.append(threading.current_thread())


async def test_calls_are_under_way_together_on_a_loop_of_the_task(site: Site) -> None:
    stream = Stream.items(list(range(20))).map_async(Meeting(20), concurrency=20)
    (outcome,) = await site.run(stream.collect())
    assert (outcome.state, site.rows) == ("finished", [10 * row for row in range(20)])
    opened, closed = SEEN
    assert opened is closed is not threading.current_thread()
    assert opened.name.endswith(" calls") and loops() == []


async def test_calls_that_wait_for_later_rows_end_a_search_for_a_row_and_not_the_task(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POISON_CALLS_SECONDS", 0.01)
    stream = Stream.items(list(range(20))).map_async(Meeting(20), concurrency=20)
    message = site.message(compile_job(stream.collect(), parallelism=1), "j1")
    (spec,) = message.tasks
    search = PoisonSearch(row=7, rows=1, reach=1_000)  # rows are taken one by one
    site.deployment.start(StartTask(message, spec.model_copy(update={"poison": search})))
    (outcome,) = await site.finish()
    assert (outcome.state, site.rows) == ("finished", [10 * row for row in range(20)])


async def cached(row: int) -> list[Any]:
    return SEEN


def with_row(found: list[Any]) -> int:
    found.append(len(found))
    return len(found)


async def test_what_a_call_looked_up_may_be_changed_behind_it(site: Site) -> None:
    (outcome,) = await site.run(
        Stream.items([1, 2, 3]).map_async(cached, concurrency=2).map(with_row).collect()
    )
    assert (outcome.state, site.rows) == ("finished", [1, 1, 1])


async def never(row: int) -> int:
    try:
        await asyncio.Event().wait()
    finally:
        SEEN.append(row)
    return row


async def test_a_call_that_takes_too_long_is_cancelled_and_dropped_as_on_error_says(site: Site) -> None:
    stream = Stream.items([1, 2]).map_async(
        never, concurrency=2, timeout=timedelta(milliseconds=5), on_error="dead_letter"
    )
    (outcome,) = await site.run(stream.collect())
    assert (outcome.state, site.rows, sorted(SEEN)) == ("finished", [], [1, 2])
    said = "dead letter: map_async: TimeoutError: no result within 0.005 s: record"
    assert site.lines == [f"{said} 1", f"{said} 2"]
    (failed,) = await site.run(
        Stream.items([1]).map_async(never, concurrency=2, timeout=timedelta(milliseconds=5)).collect(), "j2"
    )
    assert failed.error is not None and "TimeoutError: no result within 0.005 s" in failed.error.text


async def test_a_cancelled_task_ends_its_calls(site: Site) -> None:
    (task,) = site.deploy(Stream.items([1, 2]).map_async(never, concurrency=5).collect())
    await site.until(lambda: task.read_counters().state_rows == 2)
    assert len(loops()) == 1
    assert task.read_counters().rows_done == 0
    task.paths.cancel()
    (outcome,) = await site.finish()
    assert outcome.state == "canceled"
    assert sorted(SEEN) == [1, 2] and loops() == []


async def at_five(row: int) -> int:
    await asyncio.sleep(0)
    if row == 5:
        raise KeyError("five")
    return row


async def test_rows_are_given_or_lost_when_a_call_raises(site: Site) -> None:
    stream = Stream.items(list(range(8))).map_async(at_five, concurrency=3).rebalance()
    task, _ = site.deploy(stream.collect())
    await site.until(lambda: task.attempt_id in site.outcomes)
    outcome = site.outcomes[task.attempt_id]
    assert outcome.state == "failed" and outcome.error is not None
    assert "KeyError: 'five'" in outcome.error.text
    assert "in at_five" in outcome.error.traceback
    assert "minishuffle/runtime" not in outcome.error.traceback
    assert "raised in operator 'map_async' by the record 5" in outcome.error.traceback
    counters = task.read_counters()
    lost = counters.state_rows + counters.rows_dropped.get("failed_batch", 0)
    assert (counters.records_out, 5 + lost) == (5, task.operators[1].records_in)
    assert loops() == []


async def test_a_function_that_is_not_asynchronous_is_named(site: Site) -> None:
    stream = Stream.items([1]).map_async(lambda row: str(row), concurrency=2, on_error="skip")  # type: ignore[arg-type, return-value]
    (outcome,) = await site.run(stream.collect())
    assert outcome.error is not None and "this one gave str: define it with 'async def'" in outcome.error.text
    assert outcome.error.code == WrongResult.code


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"concurrency": 0}, "takes 1 to 10,000, not 0"),
        ({"concurrency": True}, "takes 1 to 10,000, not True"),
        ({"concurrency": 1, "timeout": timedelta(0)}, "above 0"),
        ({"concurrency": 1, "timeout": 5}, "datetime.timedelta"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UsageError, match=refusal):
        Stream.items([1]).map_async(never, **options)
