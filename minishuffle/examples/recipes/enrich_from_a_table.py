"""Add the columns of a small table to each event: a look-up.

Use it for names, categories and other data that fit into memory and have an end. Every subtask
reads the small table first and holds all of it; the events stay where they are, so that nothing is
shuffled. `how="left"` keeps events without an entry.

Prints::

    1 Green tea drink
    2 Blue ink office
    3 None None
    4 Green tea drink
"""

from __future__ import annotations

import pyarrow as pa

from minishuffle import LocalCluster, Table

SALES = pa.table({"sale": [1, 2, 3, 4], "item": ["tea", "ink", "pen", "tea"]})
ITEMS = pa.table({"id": ["tea", "ink"], "name": ["Green tea", "Blue ink"], "kind": ["drink", "office"]})


def main() -> None:
    named = Table.from_arrow(SALES).broadcast_join(Table.from_arrow(ITEMS), on={"item": "id"}, how="left")
    with LocalCluster(workers=2) as cluster:
        for row in cluster.run(named).sort_by("sale").to_pylist():
            print(row["sale"], row["name"], row["kind"])


if __name__ == "__main__":
    main()
