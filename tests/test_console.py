"""Tables on whatever the standard output is."""

from __future__ import annotations

import io
import sys

import pytest

from minishuffle.console import MIN_WIDTH, console, encodable, new_table


@pytest.mark.parametrize(
    ("encoding", "text", "found"),
    [
        ("ascii", "a\xfc\u4e16\U0001f600", "a\\xfc\\u4e16\\U0001f600"),
        ("utf-8", "a\xfc\udc80", "a\xfc\\udc80"),
        (None, "\u4e16", "\u4e16"),
    ],
)
def test_escapes_are_those_of_python(encoding: str | None, text: str, found: str) -> None:
    assert encodable(text, encoding) == found


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
