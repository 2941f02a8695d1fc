"""Sinks of the user's at the end of a task: how they are closed, and what they give."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import ResourceExhausted, WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.rows import unpack_result
from minishuffle.operators.base import TaskContext
from minishuffle.wire.messages import ErrorInfo
from minishuffle.worker.tasks import task as task_module
from minishuffle.worker.tasks.task import TaskOutcome

if TYPE_CHECKING:
    from conftest import Site

CLOSED: list[str] = []
"""What sinks of the tests have closed."""


def broken(row: Any) -> Any:
    return {}[row]


class RecordingSink:
    """Notes its close; ``fails_at`` is a method's name."""

    def __init__(self, name: str, fails_at: str = "") -> None:
        self.name, self.fails_at = name, fails_at

    def open(self, context: TaskContext) -> None:
        self._pass("open")

    def write(self, batch: Batch) -> None:
        self._pass("write")

    def close(self) -> Any:
        CLOSED.append(self.name)
        self._pass("close")
        return {"name": self.name}

    def _pass(self, method: str) -> None:
        if self.fails_at == method:
            raise OSError(f"{method} went wrong")


class Giving:
    """A sink that gives what it was made with."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def open(self, context: TaskContext) -> None:
        """Nothing to open."""

    def write(self, batch: Batch) -> None:
        """Nothing to keep."""

    def close(self) -> Any:
        return self.result


@pytest.fixture(autouse=True)
def _forget_closed() -> None:
    CLOSED.clear()


def error_of(outcome: TaskOutcome) -> ErrorInfo:
    assert outcome.state == "failed"
    assert outcome.error is not None
    return outcome.error


@pytest.mark.parametrize("method", ["open", "write"])
async def test_a_sink_is_closed_after_a_failure_and_has_no_result(site: Site, method: str) -> None:
    (outcome,) = await site.run(Stream.items([1]).to(RecordingSink("mine", fails_at=method)))
    assert f"OSError: {method} went wrong" in error_of(outcome).text
    assert outcome.result == b""
    assert (["mine"] if method == "write" else []) == CLOSED


async def test_what_close_raises_does_not_hide_the_first_cause(site: Site) -> None:
    (outcome,) = await site.run(Stream.items([1]).map(broken).to(RecordingSink("mine", fails_at="close")))
    error = error_of(outcome)
    assert "KeyError: 1" in error.text
    assert "and close() of 'RecordingSink' raised OSError: close went wrong" in error.traceback
    (outcome,) = await site.run(Stream.items([1]).to(RecordingSink("mine", fails_at="close")), "j2")
    assert "OSError: close went wrong" in error_of(outcome).text


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (np.int64(4), 4),
        (2**70, 2**70),
        (Decimal("1.5"), Decimal("1.5")),
        ({"n": np.float64(0.5)}, {"n": 0.5}),
    ],
    ids=str,
)
async def test_a_result_may_be_what_a_row_may_be(site: Site, result: Any, told: Any) -> None:
    (outcome,) = await site.run(Stream.items([1]).to(Giving(result)))
    assert outcome.state == "finished"
    assert unpack_result(outcome.result) == told


async def test_a_result_that_cannot_be_told_is_refused_with_the_mend(site: Site) -> None:
    (outcome,) = await site.run(Stream.items([1]).to(Giving({1, 2})))
    assert "what close() of the sink gave cannot be sent: {1, 2} (set): it holds a set; give None," in (
        error_of(outcome).text
    )
    assert error_of(outcome).code == WrongResult.code


async def test_results_and_rows_that_no_message_takes_are_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "MESSAGE_BYTES_MAX", 10)
    (outcome,) = await site.run(Stream.items(["a row of 23 characters"]).collect(), "j1")
    assert error_of(outcome).code == ResourceExhausted.code
    assert "write such rows with to_files" in error_of(outcome).text
    (outcome,) = await site.run(Stream.items([1]).to(RecordingSink("a long name")), "j2")
    assert error_of(outcome).code == WrongResult.code
    assert "write large results to a file" in error_of(outcome).text


class Counting:
    """Counts the rows that it is called with, and says how many at its end."""

    def open(self, context: TaskContext) -> None:
        self.log, self.rows = context.log, context.metrics.counter("rows")

    def __call__(self, row: int) -> int:
        self.rows.add(row)
        return row

    def write(self, batch: list[int]) -> None:
        self.rows.add(len(batch))

    def close(self) -> None:
        self.log("closed")


async def test_functions_and_sinks_have_metrics_of_their_own(site: Site) -> None:
    (outcome,) = await site.run(Stream.items([1, 2, 3]).map(Counting()).map(Counting()).to(Counting()))
    assert outcome.state == "finished"
    (attempt,) = site.deployment.snapshots()
    found = [(each.operator, each.position, each.name, each.value) for each in attempt.user_series]
    assert found == [("map", 1, "rows", 6), ("map", 2, "rows", 6), ("Counting", 3, "rows", 3)]
    site.deployment.release(list(site.deployment.attempts))
    assert site.deployment.snapshots() == ()
