"""Add sales up by the day as the shop's clock shows it, not by the day in UTC.

Use it for daily figures of one place: with `tz=` a day has 23 or 25 hours when the clocks change,
as on 29 March 2026 in Zurich. `window("month", tz=...)`, quarters and years follow the calendar
likewise.

Prints::

    2026-03-28, 24 hours: 5
    2026-03-29, 23 hours: 7
    2026-03-30, 24 hours: 9
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa

from minishuffle import LocalCluster, Table, col

SHOP = "Europe/Zurich"
SALES = [
    (datetime(2026, 3, 28, 12, tzinfo=UTC), 5),
    (datetime(2026, 3, 28, 23, 30, tzinfo=UTC), 3),  # Half past midnight in the shop.
    (datetime(2026, 3, 29, 21, 30, tzinfo=UTC), 4),
    (datetime(2026, 3, 29, 22, 30, tzinfo=UTC), 9),  # The clocks have gone forward.
]


def main() -> None:
    times, amounts = zip(*SALES, strict=True)
    sales = Table.from_arrow(pa.table({"at": times, "amount": amounts, "shop": ["z"] * len(SALES)}))
    timed = sales.event_time("at", out_of_order=timedelta(hours=1))
    days = timed.key_by("shop").window(timedelta(days=1), tz=SHOP).aggregate(total=("amount", "sum"))
    start, end = col("window_start"), col("window_end")  # In the shop's time zone.
    dated = days.with_columns(day=start.dt.date(), length=end - start)
    with LocalCluster(workers=2) as cluster:
        for row in cluster.run(dated).sort_by("window_start").to_pylist():
            print(f"{row['day']}, {row['length'] // timedelta(hours=1)} hours: {row['total']}")


if __name__ == "__main__":
    main()
