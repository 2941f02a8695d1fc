"""How often the user's functions are called: once for each record, where a record is a Python row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from minishuffle.operators.base import TaskContext

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RECORDS = 20_000
KEYS = 501


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=2, slots=2) as cluster:
        cluster.status()  # The client connects at first use.
        yield cluster


class Calls:
    """Notes each call as one line of a file of each process and thread, so that no call is lost or merged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: Any = None

    def note(self, text: object) -> None:
        import os
        import threading

        if self._file is None:
            name = f"{os.getpid()}-{threading.get_ident()}-{id(self)}"
            self._file = (self.directory / name).open("a", buffering=1)
        self._file.write(f"{text}\n")

    def read(self) -> Counter[str]:
        """How often each text was noted, by all processes together."""
        return Counter(line for path in self.directory.iterdir() for line in path.read_text().splitlines())

    @property
    def processes(self) -> set[int]:
        return {int(path.name.partition("-")[0]) for path in self.directory.iterdir()}


def calls(directory: Path) -> Calls:
    directory.mkdir()
    return Calls(directory)


@pytest.mark.parametrize("emit", ["each", "batch", "end"])
def test_key_and_reduce_functions_are_called_once_for_each_record(
    cluster: LocalCluster, tmp_path: Path, emit: Any
) -> None:
    keyed, reduced, mapped = (calls(tmp_path / name) for name in ("keyed", "reduced", "mapped"))

    def key(row: tuple[int, int]) -> int:
        keyed.note(row[0])
        return row[0] % KEYS

    def add(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
        reduced.note(second[0])
        return (first[0], first[1] + second[1])

    def pair(number: int) -> tuple[int, int]:
        mapped.note(number)
        return (number, 1)

    sums = Stream.generate(records=RECORDS).map(pair).key_by(key).reduce(add, emit)
    rows = cluster.run(sums.collect(), timeout=60)

    every = Counter(str(number) for number in range(RECORDS))
    assert mapped.read() == every
    assert keyed.read() == every
    # A key's first record becomes its value as it is: nothing to combine it with.
    assert reduced.read().total() == RECORDS - KEYS
    assert set(reduced.read().values()) == {1}
    assert keyed.processes == reduced.processes == set(cluster.workers.values())
    totals: dict[int, int] = {}
    for value, (_, total) in rows:
        totals[value] = max(total, totals.get(value, 0))
    assert totals == Counter(number % KEYS for number in range(RECORDS))
    if emit != "batch":
        assert len(rows) == (RECORDS if emit == "each" else KEYS)


def test_filter_flat_map_and_fold_functions_are_called_once_for_each_record(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    kept, split, folded = (calls(tmp_path / name) for name in ("kept", "split", "folded"))

    def keep(number: int) -> bool:
        kept.note(number)
        return number % 2 == 0

    def halves(number: int) -> list[int]:
        split.note(number)
        return [number // 2, number // 2]

    def add(total: int, number: int) -> int:
        folded.note(number)
        return total + 1

    stream = Stream.generate(records=RECORDS).filter(keep).flat_map(halves)
    rows = cluster.run(stream.key_by(lambda number: number).fold(int, add).collect(), timeout=60)

    assert kept.read() == Counter(str(number) for number in range(RECORDS))
    assert split.read() == Counter(str(number) for number in range(0, RECORDS, 2))
    assert folded.read() == Counter({str(number): 2 for number in range(RECORDS // 2)})
    assert sorted(rows) == [(number, 2) for number in range(RECORDS // 2)]


def test_a_user_partitioner_is_called_once_for_each_record(cluster: LocalCluster, tmp_path: Path) -> None:
    chosen = calls(tmp_path / "chosen")

    def choose(number: int, count: int) -> int:
        chosen.note(number)
        return number % 7 % count

    class Where:
        """A sink that tells which numbers came to it."""

        def open(self, context: TaskContext) -> None:
            self.index = context.index
            self.seen: set[int] = set()

        def write(self, batch: Any) -> None:
            self.seen.update(number % 7 % 2 for number in batch)

        def close(self) -> Any:
            return [self.index, sorted(self.seen)]

    numbers = Stream.generate(records=RECORDS).partition(choose).map(abs).to(Where())
    result = cluster.submit(numbers, parallelism=2).wait(60)
    assert chosen.read() == Counter(str(number) for number in range(RECORDS))
    assert sorted(sink.value for sink in result.results) == [[0, [0]], [1, [1]]]
