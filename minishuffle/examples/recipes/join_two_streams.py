"""Join ads that were shown with the clicks that followed within a quarter of an hour.

Use it for any two streams of events that belong together and come at different times: requests and
answers, orders and payments, predictions and what came of them. Each event is held only until no
partner can come any more. With `how="left"` an ad without a click comes out too, alone.

Prints::

    tea, shown at 09:00, was clicked at 09:03
    ink, shown at 09:05, was not clicked
    tea, shown at 09:30, was not clicked
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from minishuffle import LocalCluster, Stream

NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)
SHOWN = [("r1", 0, "tea"), ("r2", 5, "ink"), ("r3", 30, "tea")]
CLICKED = [("r1", 3, "tea"), ("r2", 50, "ink")]


def events(rows: list[tuple[str, int, str]], out_of_order: timedelta) -> Stream[dict[str, Any]]:
    named = [{"request": request, "at": NINE + timedelta(minutes=m), "ad": ad} for request, m, ad in rows]
    return Stream.items(named).event_time("at", out_of_order=out_of_order)


def main() -> None:
    shown = events(SHOWN, timedelta(seconds=10)).key_by("request")
    clicked = events(CLICKED, timedelta(minutes=5)).key_by("request")
    pairs = shown.join(clicked, how="left", before=timedelta(0), after=timedelta(minutes=15))
    with LocalCluster(workers=2) as cluster:
        for _, ad, click in sorted(cluster.run(pairs), key=lambda pair: pair[0]):
            after = f"clicked at {click['at']:%H:%M}" if click else "not clicked"
            print(f"{ad['ad']}, shown at {ad['at']:%H:%M}, was {after}")


if __name__ == "__main__":
    main()
