"""``bench wordcount``: the text it counts, and, on real processes, what it says and that it can fail."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from minishuffle.bench import words
from minishuffle.bench.words import Words, write_text
from minishuffle.cli.main import cli


def test_the_text_has_the_words_that_the_generator_counted(tmp_path: Path) -> None:
    path = tmp_path / "text"
    counts = write_text(path, 300_000)
    text = path.read_bytes().decode()
    assert Counter(text.split()) == counts
    assert 300_000 <= len(text.encode()) < 2_000_000
    lines = text.split("\n")
    assert 8 < sum(counts.values()) / len(lines) < 12
    assert any(line.startswith(" ") for line in lines)
    assert all(space in text for space in ("  ", "\u2003", "\u00a0"))
    first, *_, last = sorted(counts.values(), reverse=True)
    assert first > 1000 * last, "by Zipf's law"


def test_words_have_a_name_each() -> None:
    assert len({words.word_of(rank) for rank in range(words.DISTINCT)}) == words.DISTINCT


@pytest.mark.parametrize("split_bytes", [1_000, 1_001, 4_096, 10_000_000])
def test_the_splits_have_each_word_once(
    tmp_path: Path, split_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "SPLIT_BYTES", split_bytes)
    path = tmp_path / "text"
    counts = write_text(path, 50_000)
    source = Words(path)
    found = [word for split in source.splits() for batch in source.read(split, 0) for word in batch["word"]]
    assert Counter(word.as_py() for word in found) == counts


def test_the_last_word_does_not_depend_on_what_lies_in_memory_behind_the_text(tmp_path: Path) -> None:
    path, size = tmp_path / "text", 1 << 16
    path.write_text("ab " * (size // 3) + "\n")
    for _ in range(5):
        used_before = [pa.allocate_buffer(size + more) for more in (0, 64) for _ in range(8)]
        for buffer in used_before:
            np.frombuffer(buffer, np.uint8).fill(0xFF)
        del used_before, buffer
        source = Words(path)
        found = [batch["word"] for split in source.splits() for batch in source.read(split, 0)]
        assert pa.chunked_array(found).unique().to_pylist() == ["ab"]


def test_a_split_of_white_space_alone_has_no_words(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(" \u2003\n \u00a0\n")
    source = Words(path)
    assert [batch for split in source.splits() for batch in source.read(split, 0)] == []


def test_a_line_that_ends_where_a_split_does_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "SPLIT_BYTES", 4)
    path = tmp_path / "text"
    path.write_text("a b\nc d\ne\n")
    source = Words(path)
    assert [
        [word for batch in source.read(split, 0) for word in batch["word"].to_pylist()]
        for split in source.splits()
    ] == [["a", "b"], ["c", "d"], ["e"]]


def run(*options: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "wordcount", "--megabytes", "1", *options])


@pytest.mark.slow
@pytest.mark.parametrize("format", ["rows", "arrow"])
def test_a_run_is_verified(format: str) -> None:
    result = run("--format", format, "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert measured["verified"] is True
    assert measured["words"] > 100_000 and measured["distinct"] > 10_000
    assert measured["words_per_second"] == pytest.approx(measured["words"] / measured["seconds"], rel=0.05)


@pytest.mark.slow
def test_a_wrong_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def miscounted(path: Path, size: int) -> dict[str, int]:
        counts = write_text(path, size)
        counts[words.word_of(0)] += 1
        return counts

    monkeypatch.setattr(words, "write_text", miscounted)
    result = run()
    assert result.exit_code == 1
    assert "the counts differ from those of the generator" in result.output
