"""Read lines of JSON, compute with their columns, and write lines of JSON.

Use it for logs and exports. Reading is built in, structs and lists included; a line that cannot be
read is dropped and kept in the job's log with `on_error="dead_letter"`. Writing is a sink of a few
lines, with a file for each subtask.

Prints::

    {"user": "ann", "price": 12.5, "n": 1, "amount": 12.5}
    {"user": "bob", "price": 7.0, "n": 2, "amount": 14.0}
    lines that could not be read: 1
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa

from minishuffle import LocalCluster, Table, TaskContext, col

LINES = """\
{"user": "ann", "price": 12.5, "n": 1}
{"user": "bob", "price": 7, "n": 2}
{"user": "cy", "price":
"""


class JsonLines:
    result_only = False
    """What `write` has written stays, whatever becomes of the subtask."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def open(self, context: TaskContext) -> None:
        self.path = Path(self.folder, f"part-{context.index}.json")

    def write(self, batch: pa.RecordBatch) -> None:
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(row, default=str) + "\n" for row in batch.to_pylist()))

    def close(self) -> None:
        pass


def main() -> None:
    schema = {"user": str, "price": float, "n": int}
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=2) as cluster:
        read = Path(folder, "orders.json")
        read.write_text(LINES)
        orders = Table.from_files(read, format="json", schema=schema, on_error="dead_letter")
        priced = orders.with_columns(amount=col("price") * col("n"))
        job = cluster.submit(priced.to(JsonLines(folder)))
        job.wait()
        written = [part.read_text() for part in Path(folder).glob("part-*")]
        print("".join(written) + f"lines that could not be read: {len(list(job.logs()))}")


if __name__ == "__main__":
    main()
