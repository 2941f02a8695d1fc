"""``bench wordcount``: words per second through a count by word, on a real cluster, checked.

The text is generated from a seed, into a file that workers read inside the timed window: lines of about ten
words out of 100,000, by Zipf's law (the word of rank n is n times rarer than the first), with leading,
double and Unicode spaces among them. ``rows`` splits each line with ``str.split`` and calls a Python key
function for each word; ``arrow`` has the same words as a column. The count of every word is compared with
that of the generator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.bench.keyby import elapsed
from minishuffle.local import LocalCluster

__all__ = ["Words", "measure_wordcount", "write_text"]

DISTINCT: Final = 100_000
SEED: Final = 11
BLOCK_WORDS: Final = 1_000_000
LINE_WORDS: Final = 10
SPACES: Final = (" ", "  ", " \u2003", "\u00a0", "\n", "\n ")
SPACE_SHARES: Final = (0.87, 0.01, 0.01, 0.01, 0.09, 0.01)
"""How often each stands behind a word; the last two end a line."""
WIDE_SPACES: Final = frozenset("".join(SPACES)) - frozenset(" \n")
SPLIT_BYTES: Final = 4 << 20
BATCH_WORDS: Final = 65_536
Format = Literal["rows", "arrow"]


def word_of(rank: int) -> str:
    """The word of a rank from 0: distinct, of 2 to 12 characters, now and then with one beyond ASCII."""
    letters = ""
    rest = rank
    while rest or not letters:
        rest, digit = divmod(rest, 26)
        letters += chr(ord("a") + digit)
    return letters + ("é" if rank % 50 == 7 else "-") + "etaoinsh"[: rank * 7 % 9]


def write_text(path: Path, size: int) -> dict[str, int]:
    """Write about ``size`` bytes of text (not less); gives how often each word is in it."""
    words = list(map(word_of, range(DISTINCT)))
    weights = np.cumsum(1.0 / np.arange(1, DISTINCT + 1))
    random = np.random.default_rng(SEED)
    counts = np.zeros(DISTINCT, dtype=np.int64)
    written = 0
    with path.open("wb") as file:
        while written < size:
            count = min(BLOCK_WORDS, (size - written) // 4 + 1)
            ranks = np.searchsorted(weights, random.random(count) * weights[-1])
            counts += np.bincount(ranks, minlength=DISTINCT)
            behind = random.choice(len(SPACES), count, p=SPACE_SHARES)
            pieces = zip(
                map(words.__getitem__, ranks.tolist()), map(SPACES.__getitem__, behind.tolist()), strict=True
            )
            written += file.write("".join(chain.from_iterable(pieces)).encode())
    return {words[rank]: int(counts[rank]) for rank in np.flatnonzero(counts).tolist()}


class Words:
    """Source: the words of a text file, split at white space, as a column ``word``."""

    format = "arrow"
    bounded = True
    schema: ClassVar = {"word": str}

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        size = path.stat().st_size
        ends = [*range(SPLIT_BYTES, size, SPLIT_BYTES), size]
        self._splits = list(zip([0, *ends], ends, strict=False))

    def splits(self) -> Sequence[tuple[int, int]]:
        return self._splits

    def read(self, split: tuple[int, int], offset: int) -> Iterator[pa.RecordBatch]:
        """Batches of the lines that begin in the split; ``offset`` is 0, since nothing is restarted."""
        begin, end = split
        with open(self._path, "rb") as file:
            if begin:
                file.seek(begin - 1)
                file.readline()
                begin = file.tell()
            text = file.read(max(0, end - 1 - begin)) + file.readline()
        if begin < end:
            whole = pa.array([text], pa.large_binary()).cast(pa.large_string())
            # Arrow looks up each character among all of Unicode's otherwise, which takes half as long again.
            for space in WIDE_SPACES:
                whole = pc.replace_substring(whole, space, " ")
            # Without the last line's end: Arrow looks one byte further there (apache/arrow#37757), and what
            # lies in memory behind the text now and then made a word of "word" and its line's end.
            words = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(whole)).flatten().cast(pa.string())
            if words[0].as_py() == "":  # nothing but white space
                return
            for first in range(0, len(words), BATCH_WORDS):
                yield pa.RecordBatch.from_arrays([words.slice(first, BATCH_WORDS)], ["word"])


def _itself(word: str) -> str:
    return word


def wordcount_stream(path: Path, format: Format) -> StreamBase:
    """The job: how often each word occurs."""
    if format == "arrow":
        return Table.source(Words(path)).key_by("word").aggregate(count=("word", "count")).collect()
    return Stream.text(str(path)).flat_map(str.split).key_by(_itself).count().collect()


def measure_wordcount(*, format: Format, workers: int, megabytes: int) -> dict[str, Any]:
    """Run it once; see the module for what is measured.

    Raises:
        ShuffleError: the job failed.
    """
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=workers, slots=1) as cluster:
        path = Path(folder) / "text"
        expected = write_text(path, megabytes * 1_000_000)
        handle = cluster.submit(wordcount_stream(path, format), name="bench-wordcount", parallelism=workers)
        result = handle.wait(600)
    counted = dict(map(tuple, (row.values() if isinstance(row, dict) else row for row in result.rows)))
    seconds, words = elapsed(result.tasks), sum(expected.values())
    return {
        "format": format,
        "words_per_second": round(words / seconds),
        "words": words,
        "seconds": round(seconds, 3),
        "distinct": len(counted),
        "verified": counted == expected and len(result.rows) == len(counted),
    }
