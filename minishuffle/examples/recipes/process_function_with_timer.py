"""Say which orders were not paid within half an hour.

Use it for whatever has to be noticed because nothing comes: `on_record` sees each event with the
state of its key and sets a timer, `on_timer` runs when event time has reached it. The same fits any
rule that windows and joins cannot say.

Prints::

    order 2 of 09:05 was not paid by 09:35
    order 3 of 09:10 was not paid by 09:40
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from minishuffle import LocalCluster, ProcessContext, Stream

PATIENCE = timedelta(minutes=30)
NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)
EVENTS = [(1, 0, "ordered"), (2, 5, "ordered"), (3, 10, "ordered"), (1, 20, "paid"), (3, 45, "paid")]


def on_record(event: dict[str, Any], context: ProcessContext) -> None:
    context.state[event["what"]] = event["at"]
    if event["what"] == "ordered":
        context.set_timer(event["at"] + PATIENCE)


def on_timer(at: datetime, context: ProcessContext) -> Iterable[str]:
    ordered, paid = context.state["ordered"], context.state.get("paid")
    context.state.clear()
    if paid is not None and paid <= at:
        return []
    return [f"order {context.key} of {ordered:%H:%M} was not paid by {at:%H:%M}"]


def main() -> None:
    rows = [{"order": order, "at": NINE + timedelta(minutes=m), "what": what} for order, m, what in EVENTS]
    events = Stream.items(rows).parallel(1).event_time("at", watermarks="each")
    unpaid = events.key_by("order").process(on_record, on_timer)
    with LocalCluster(workers=2) as cluster:
        print(*sorted(cluster.run(unpaid)), sep="\n")


if __name__ == "__main__":
    main()
