"""Tables on whatever the standard output is."""

from __future__ import annotations

import io
import sys

import pytest

from minishuffle.console import MIN_WIDTH, console, new_table


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
