"""Score rows with a model that each subtask loads once.

Use it for predictions on a stream. `open` runs once for each subtask, before the first row, so that
a large model is not loaded for every batch; the function gets whole batches, which numpy,
scikit-learn or PyTorch take as they are.

Prints::

    0 -1.0 no
    1 1.0 yes
    2 5.0 yes
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from minishuffle import LocalCluster, Table, TaskContext, col

ROWS = pa.table({"id": [0, 1, 2], "x0": [0.0, 1.0, 2.0], "x1": [0.0, 0.0, 1.0]})
SCHEMA = {"id": "int64", "score": "float64"}


class Score:
    def __init__(self, file: Path) -> None:
        self.file = file

    def open(self, context: TaskContext) -> None:
        model = np.load(self.file)
        self.weights, self.bias = model["weights"], model["bias"]

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        inputs = np.column_stack([batch["x0"], batch["x1"]])
        scores = inputs @ self.weights + self.bias
        return pa.RecordBatch.from_pydict({"id": batch["id"], "score": scores})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=2) as cluster:
        file = Path(folder, "model.npz")
        np.savez(file, weights=[2.0, 2.0], bias=-1.0)
        scored = Table.from_arrow(ROWS).map_batches(Score(file), schema=SCHEMA)
        found = scored.with_columns(likely=col("score") > 0)
        for row in cluster.run(found).sort_by("id").to_pylist():
            print(row["id"], row["score"], "yes" if row["likely"] else "no")


if __name__ == "__main__":
    main()
