"""Lines of text files, wherever the splits are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.connectors.text import TextSource
from minishuffle.errors import UsageError
from support.sourcereading import read_all


@given(
    lines=st.lists(
        st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=12), max_size=30
    ),
    crlf=st.booleans(),
    end=st.booleans(),
    split_bytes=st.integers(1, 40),
)
def test_text_lines(
    lines: list[str], crlf: bool, end: bool, split_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ending = "\r\n" if crlf else "\n"
    text = ending.join(lines) + (ending if end and lines else "")
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(text.encode())
    expected = text.replace("\r\n", "\n").split("\n")
    if not expected[-1]:
        expected.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minishuffle.connectors.text.TEXT_SPLIT_BYTES", split_bytes)
        source = TextSource(path)
        starts = [start for _, start, _ in source.splits()]
    assert read_all(source) == [
        line.removeprefix("\ufeff") if i == 0 else line for i, line in enumerate(expected)
    ]
    data = text.encode()
    assert all(start == 0 or data[start - 1 : start] == b"\n" for start in starts)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffd\n")
    with pytest.raises(UsageError, match=r"a\.txt is not UTF-8 at byte 6: convert it"):
        read_all(TextSource(tmp_path / "a.txt"))


def test_directories_and_patterns_mean_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.log", ".hidden", "_SUCCESS"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sub").mkdir()
    assert read_all(TextSource(tmp_path)) == ["a.txt", "b.txt", "c.log"]
    assert read_all(TextSource(str(tmp_path / "*.txt"))) == ["a.txt", "b.txt"]
    assert read_all(TextSource([tmp_path / "c.log", str(tmp_path / "a*")])) == ["c.log", "a.txt"]
