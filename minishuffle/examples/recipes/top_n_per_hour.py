"""Find the most viewed pages of each hour.

Use it for rankings by time: count in windows first, then keep the greatest counts of each window.
Where two counts are equal, the smaller page comes first.

Prints::

    09:00 home 3
    09:00 shoes 2
    10:00 cart 2
    10:00 home 1
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa

from minishuffle import LocalCluster, Table

NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)
PAGES = ["home", "shoes", "home", "cart", "shoes", "home", "cart", "home", "cart", "shoes"]
"""The pages in their order, one every ten minutes."""


def main() -> None:
    times = [NINE + timedelta(minutes=10 * number) for number in range(len(PAGES))]
    views = Table.from_arrow(pa.table({"at": times, "page": PAGES})).event_time("at")
    hourly = views.key_by("page").window(timedelta(hours=1)).count()
    top = hourly.key_by("window_start").top_n(2, by="count")
    with LocalCluster(workers=2) as cluster:
        found = cluster.run(top).sort_by([("window_start", "ascending"), ("count", "descending")])
        for row in found.to_pylist():
            print(f"{row['window_start']:%H:%M} {row['page']} {row['count']}")


if __name__ == "__main__":
    main()
