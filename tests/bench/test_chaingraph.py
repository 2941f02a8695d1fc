"""The chain of ``bench recovery``: what its sources make, and the audit of its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.bench import chaingraph
from minishuffle.bench.chaingraph import PARALLELISM, Rereadable, Window, audit_windows, read_windows
from minishuffle.bench.numbered import KEYS, OutputAudit

RATE = 1_000.0
SECOND = 1_000_000


def rows_of(source: Rereadable, split: int, offset: int, count: int | None = None) -> list[Any]:
    return list(islice((row for batch in source.read(split, offset) for row in batch), count))


def test_rows_can_be_read_again_from_any_place_up_to_where_they_end(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    source = Rereadable(time.monotonic_ns() - 10**9, RATE, str(stop))
    first = rows_of(source, 1, 0, 40)
    assert first == [(number, number * 1_000) for number in range(1, 1 + 40 * PARALLELISM, PARALLELISM)]
    assert rows_of(source, 1, 25, 15) == first[25:]
    stop.write_text("42")
    ends = [rows_of(source, split, 0)[-1][0] for split in source.splits()]
    assert ends == [40, 41, 38, 39] and rows_of(source, 1, 11) == []


def test_what_is_not_due_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = [10**9]

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += int(seconds * 1e9) + 1_000

    monkeypatch.setattr(chaingraph.time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(chaingraph.time, "sleep", sleep)
    source = Rereadable(10**9, 10.0, str(tmp_path / "stop"))
    assert rows_of(source, 1, 0, 2) == [(1, 100_000), (5, 500_000)]
    assert sum(slept) == pytest.approx(0.5, abs=0.01) and max(slept) <= chaingraph.REST_SECONDS_MAX


def whole(count: int) -> list[Window]:
    """What the job makes of so many records."""
    found: dict[tuple[int, int], list[int]] = {}
    for number in range(count):
        found.setdefault((number % KEYS, number // int(RATE) * SECOND), []).append(number)
    return [Window(key, start, numbers) for (key, start), numbers in found.items()]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, OutputAudit(0, 0, 0)),
        ({7: []}, OutputAudit(1, 0, 0)),
        ({7: [[7], [7]]}, OutputAudit(0, 1, 0)),
        ({7: [[7, 7]]}, OutputAudit(0, 1, 0)),
        ({7: [[8]]}, OutputAudit(1, 0, 1)),
        ({7: [[], [7, 99_999]]}, OutputAudit(0, 0, 1)),
    ],
)
def test_the_audit_finds_what_is_lost_again_and_wrong(
    changed: dict[int, Sequence[Sequence[int]]], expected: OutputAudit
) -> None:
    rows = []
    for row in whole(3_500):
        there = changed.get(row.key, [row.numbers]) if row.start == 0 else [row.numbers]
        rows += [row._replace(numbers=numbers) for numbers in there]
    assert audit_windows(rows, 3_500, RATE) == expected


def test_a_window_in_two_halves_is_lost_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves hold all of it, and neither is the answer."""
    monkeypatch.setattr(chaingraph, "KEYS", 2)
    halves = [Window(0, 0, [0, 2]), Window(0, 0, [4]), Window(1, 0, [1, 3, 5])]
    assert audit_windows(halves, 6, RATE) == OutputAudit(1, 1, 0)


def test_windows_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    starts = pa.array([datetime.fromtimestamp(3, UTC)], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"key": [7], "start": starts, "numbers": [[3_007, 3_007]]}), path)
    assert list(read_windows([path])) == [Window(7, 3 * SECOND, [3_007, 3_007])]
