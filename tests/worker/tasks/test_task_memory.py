"""What a task held is gone when its job is released, without the garbage collector."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.worker.tasks import task as task_module

if TYPE_CHECKING:
    from conftest import Site

ROWS = 500
RUNS = 3


class Endless:
    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        while True:
            yield list(range(100))


class Keeping:
    """A sink with state of its own."""

    def open(self, context: Any) -> None:
        self.context = context
        self.rows: list[Any] = []

    def write(self, batch: Any) -> None:
        self.rows += batch

    def close(self) -> int:
        return len(self.rows)


def last_fails(row: int) -> int:
    return row // (row - ROWS + 1)


def rows() -> Stream[Any]:
    return Stream.items(range(ROWS))


def columns() -> Any:
    return Table.generate(records=ROWS).key_by("number")


JOBS: dict[str, Callable[[], StreamBase]] = {
    "count": lambda: rows().key_by(lambda row: row % 7).count().collect(),
    "fold": lambda: rows().key_by(lambda row: row % 7).fold(int, lambda total, row: total + row).to_count(),
    "reduce": lambda: rows().key_by(lambda row: row % 7).reduce(lambda one, two: one + two).print(),
    "aggregate": lambda: columns().aggregate("end", total=("number", "sum")).to_count(),
    "union": lambda: rows().union(rows().map(abs)).rebalance().collect(),
    "custom": lambda: rows().partition(lambda row, consumers: row % consumers).to_count(),
    "failing": lambda: rows().rebalance().map(last_fails).to_count(),
    "own sink": lambda: rows().filter(lambda row: row % 2).rebalance().to(Keeping()),
}


def is_ours(value: Any) -> bool:
    """Whether an operator made that for itself: its state, and not what it was given."""
    return type(value).__module__.startswith(
        ("minishuffle.api", "minishuffle.connectors", "minishuffle.operators", "minishuffle.plan")
    )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """References to the chain, the operators and what belongs to each task; no collector runs meanwhile."""
    found: list[weakref.ref[Any]] = []

    class Watched(task_module.Chain):
        def __init__(self, program: Any, partitions: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(program, partitions, *arguments, **options)
            found.extend(map(weakref.ref, [self, *program.operators, *partitions.values()]))
            found.extend(weakref.ref(output.choose) for output in program.outputs if output.choose)
            for operator in program.operators:
                own = [value for value in vars(operator).values() if type(value).__weakrefoffset__]
                found.extend(weakref.ref(value) for value in own if is_ours(value))

    monkeypatch.setattr(task_module, "Chain", Watched)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


def alive(opened: list[weakref.ref[Any]]) -> list[str]:
    return [type(thing).__name__ for reference in opened if (thing := reference()) is not None]


async def gone(site: Site, opened: list[weakref.ref[Any]]) -> None:
    """The job was released: only threads that are about to end may still hold what it had."""
    names = threading.enumerate
    await site.until(lambda: not any(thread.name.startswith("j1:") for thread in names()))
    assert opened
    assert alive(opened) == []


@pytest.mark.parametrize("job", JOBS)
async def test_operators_and_state_of_a_released_job_are_gone(
    site: Site, opened: list[weakref.ref[Any]], job: str
) -> None:
    for _ in range(RUNS):
        outcomes = await site.run(JOBS[job](), parallelism=2)
        assert ("failed" in {outcome.state for outcome in outcomes}) == (job == "failing")
        gates = [gate for task in site.tasks() for gate in task.gates]
        opened += [weakref.ref(thing) for gate in gates for thing in (gate, *gate.channels)]
        gates.clear()
        site.release()
        site.outcomes.clear()
        site.reports.clear()
        await gone(site, opened)


async def test_operators_of_a_cancelled_job_are_gone(site: Site, opened: list[weakref.ref[Any]]) -> None:
    tasks = site.deploy(Stream.source(Endless()).key_by(abs).count().to_count(), parallelism=2)
    await site.until(lambda: all(task.counters.records_in for task in tasks if task.gates))
    for task in tasks:
        task.paths.cancel()
    await site.finish()
    del task
    tasks.clear()
    site.release()
    await gone(site, opened)
