"""Where records of CSV files begin."""

from __future__ import annotations

import pytest

from minishuffle.dataflow.operators.filerecords import csv_lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a,b\n1,2\n", [1, 2]),
        ("a,b\r\n\r\n1,2", [1, 3]),
        ("a\r\rb\r", [1, 3]),
        ('"a\n",b\n"1""\n2",3\n4,5\n', [1, 3, 5]),
        ('5" pipe\nx"\ny\n', [1, 2, 3]),
        ('"a"b"\n1\n', [1, 2]),
        ("\n\n", []),
    ],
)
def test_lines_in_which_records_begin(text: str, lines: list[int]) -> None:
    assert list(csv_lines(text.encode(), ",")) == lines


@pytest.mark.parametrize("delimiter", [";", "\t", "|", "^", "]", "-"])
def test_any_delimiter(delimiter: str) -> None:
    assert list(csv_lines(f'"a\n"{delimiter}"b\n"\nc\n'.encode(), delimiter)) == [1, 4]
