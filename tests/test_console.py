"""Tables on whatever the standard output is."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from minishuffle.console import MIN_WIDTH, console, new_table, print_rows


def test_a_table_in_a_file_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    table = new_table(["name", "count"], right=["count"])
    table.add_row("\xfc" * 20, "1")
    out = console()
    out.print(table)
    assert out.width == MIN_WIDTH
    sys.stdout.flush()
    written = sys.stdout.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert [line.split() for line in written.splitlines()] == [["name", "count"], ["\\xfc" * 20, "1"]]


def printed_rows(capsys: pytest.CaptureFixture[str], rows: list[Any]) -> list[str]:
    print_rows(console(), rows)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_tuples_are_columns_and_times_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    at = datetime(2026, 3, 28, 20, tzinfo=UTC)
    assert printed_rows(capsys, [(105, at, None), (7, at, 2.5)]) == [
        "[0]  [1]                        [2]",
        "105  2026-03-28 20:00:00+00:00  null",
        "7    2026-03-28 20:00:00+00:00  2.5",
    ]
    assert printed_rows(capsys, [(1, 2), (3,)]) == ["row", "(1, 2)", "(3,)"]
    assert printed_rows(capsys, [(), ()]) == ["row", "()", "()"]
    assert printed_rows(capsys, [at, "a"]) == ["row", "2026-03-28 20:00:00+00:00", "'a'"]


def test_columns_that_do_not_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Four of 28 fit into 120, as they are folded, and a fifth of 8 does not."""
    rows = [{f"column-{place}": "x" * 50 for place in range(12)}]
    heads, *folded, left = printed_rows(capsys, rows)
    assert heads.split() == ["column-0", "column-1", "column-2", "column-3"]
    assert "".join("".join(folded).split()) == "x" * 200
    others = ", ".join(f"column-{place}" for place in range(4, 12))
    assert left == f"… and 8 more columns: {others}"
