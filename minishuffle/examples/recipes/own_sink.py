"""Write results into a database: here SQLite, and any other the same way.

Use it where results are to be in a system of yours. Each subtask opens its own connection. A
transaction for each batch, with rows replaced by their key, makes it safe to write a row twice;
`result_only = False` says that rows are kept once `write` returns, so that none counts as lost if
the subtask fails later. Behind a stream `write` gets a list of rows; behind a table a
`pyarrow.RecordBatch`, unless `to_rows()` comes before `to`.

Prints::

    bob 37.0
    ann 15.5
    cy 3.0
    rows written: 3
"""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from minishuffle import LocalCluster, Stream, TaskContext

ORDERS = [("ann", 12.5), ("bob", 30.0), ("ann", 3.0), ("cy", 3.0), ("bob", 7.0)]


class Totals:
    result_only = False

    def __init__(self, file: str) -> None:
        self.file = file

    def open(self, context: TaskContext) -> None:
        self.database = sqlite3.connect(self.file, timeout=30)
        self.rows = 0

    def write(self, batch: list[tuple[str, float]]) -> None:
        with self.database:
            self.database.executemany("insert or replace into totals values (?, ?)", batch)
        self.rows += len(batch)

    def close(self) -> int:
        self.database.close()
        return self.rows


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=2) as cluster:
        file = str(Path(folder, "shop.sqlite"))
        database = sqlite3.connect(file)
        database.execute("create table totals (customer text primary key, total real)")
        orders = Stream.items(ORDERS).key_by(lambda order: order[0])
        spent = orders.fold(float, lambda total, order: total + order[1])
        result = cluster.submit(spent.to(Totals(file))).wait()
        for customer, total in database.execute("select * from totals order by total desc"):
            print(customer, total)
        database.close()
        print("rows written:", sum(subtask.value for subtask in result.results))


if __name__ == "__main__":
    main()
