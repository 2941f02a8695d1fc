"""Give each trade the latest price before it.

Use it where one side says how things are from now on (prices, exchange rates, positions, settings)
and the other what happens meanwhile. `tolerance` is how old the latest may be; a row without one
gets nulls.

Prints::

    09:00:02 MSFT 3 at 51.95
    09:00:05 MSFT 7 at 51.97
    09:00:06 GOOG 2 at 720.5
    09:05:00 GOOG 1 at None
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa

from minishuffle import LocalCluster, Table

NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)
QUOTES = [(1, "MSFT", 51.95), (2, "GOOG", 720.50), (4, "MSFT", 51.97), (8, "MSFT", 51.99)]
TRADES = [(2, "MSFT", 3), (5, "MSFT", 7), (6, "GOOG", 2), (300, "GOOG", 1)]


def timed(rows: list[tuple[int, str, float]] | list[tuple[int, str, int]], value: str) -> Table:
    seconds, symbols, values = zip(*rows, strict=True)
    times = [NINE + timedelta(seconds=second) for second in seconds]
    data = pa.table({"at": times, "symbol": symbols, value: values})
    return Table.from_arrow(data).event_time("at", out_of_order=timedelta(seconds=5))


def main() -> None:
    trades, quotes = timed(TRADES, "shares"), timed(QUOTES, "price")
    priced = trades.key_by("symbol").asof_join(quotes.key_by("symbol"), tolerance=timedelta(minutes=1))
    with LocalCluster(workers=2) as cluster:
        for row in cluster.run(priced).sort_by("at").to_pylist():
            print(f"{row['at']:%H:%M:%S} {row['symbol']} {row['shares']} at {row['price']}")


if __name__ == "__main__":
    main()
