"""Write one CSV file for each day.

Use it where somebody expects files by date. `partition` brings all rows of a day to one subtask, so
that no two write one file. The sink appends; since what it wrote stays, whatever becomes of the
subtask, it says `result_only = False`.

Prints::

    2026-01-01.csv ann,5 bob,7
    2026-01-02.csv ann,1
    2026-01-03.csv cy,2 dan,4
"""

from __future__ import annotations

import csv
import tempfile
from datetime import date
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from minishuffle import LocalCluster, Stream, TaskContext

Order = tuple[date, str, int]

ORDERS: list[Order] = [
    (date(2026, 1, 1), "ann", 5),
    (date(2026, 1, 1), "bob", 7),
    (date(2026, 1, 2), "ann", 1),
    (date(2026, 1, 3), "cy", 2),
    (date(2026, 1, 3), "dan", 4),
]


class DayFiles:
    result_only = False

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def open(self, context: TaskContext) -> None:
        self.folder.mkdir(exist_ok=True)

    def write(self, batch: list[Order]) -> None:
        for day, orders in groupby(sorted(batch, key=itemgetter(0)), key=itemgetter(0)):
            with open(self.folder / f"{day}.csv", "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(columns for _, *columns in orders)

    def close(self) -> None:
        pass


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=2) as cluster:
        by_day = Stream.items(ORDERS).parallel(1).partition(lambda order, count: order[0].toordinal() % count)
        cluster.submit(by_day.to(DayFiles(folder))).wait()
        for file in sorted(Path(folder).iterdir()):
            print(file.name, *file.read_text().split())


if __name__ == "__main__":
    main()
