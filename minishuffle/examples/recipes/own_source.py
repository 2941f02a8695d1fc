"""Read a format or a system that is not built in.

Use it for a queue, an API or files of your own. A source lists its splits, which subtasks share
out, and reads one from a record number on: so a subtask that is lost goes on where it was. Here a
split is a file with a record a block.

Prints::

    {'name': 'ann', 'town': 'Oslo'}
    {'name': 'bob', 'town': 'Bern'}
    {'name': 'cy', 'town': 'Rome'}
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from minishuffle import LocalCluster, Stream

BATCH_ROWS = 1000


class Blocks:
    """Files in which a line is a field and an empty line ends a record."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(map(str, Path(folder).glob("*.txt")))

    def splits(self) -> list[str]:
        return self.files

    def read(self, split: str, offset: int) -> Iterator[list[dict[str, str]]]:
        blocks = Path(split).read_text().strip().split("\n\n")
        records = (dict(line.split(": ") for line in block.splitlines()) for block in blocks)
        left = islice(records, offset, None)
        while batch := list(islice(left, BATCH_ROWS)):
            yield batch


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=2) as cluster:
        Path(folder, "a.txt").write_text("name: ann\ntown: Oslo\n\nname: bob\ntown: Bern\n")
        Path(folder, "b.txt").write_text("name: cy\ntown: Rome\n")
        people = Stream.source(Blocks(folder))
        for person in sorted(cluster.run(people), key=str):
            print(person)


if __name__ == "__main__":
    main()
