"""Let each event through once, though its sender repeats it.

Use it behind senders that retry, as webhooks and message queues do: the first event of an id goes
on at once, and an id is forgotten an hour of event time after its first event, so that what is held
stays bounded.

Prints::

    1 ann pays 5
    2 bob pays 7
    3 ann pays 1
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from minishuffle import LocalCluster, ProcessContext, Stream

START = datetime(2026, 1, 1, tzinfo=UTC)
REPEATED_WITHIN = timedelta(hours=1)

EVENTS = [
    {"id": 1, "at": START, "text": "ann pays 5"},
    {"id": 2, "at": START + timedelta(seconds=1), "text": "bob pays 7"},
    {"id": 1, "at": START + timedelta(seconds=2), "text": "ann pays 5"},
    {"id": 3, "at": START + timedelta(seconds=3), "text": "ann pays 1"},
    {"id": 2, "at": START + timedelta(minutes=30), "text": "bob pays 7"},
]


def first_of_its_id(event: dict[str, Any], context: ProcessContext) -> Iterable[dict[str, Any]]:
    if context.state:
        return []
    context.state["seen"] = True
    context.set_timer(event["at"] + REPEATED_WITHIN)
    return [event]


def forget(at: datetime, context: ProcessContext) -> None:
    context.state.clear()


def main() -> None:
    events = Stream.items(EVENTS).event_time("at", out_of_order=timedelta(minutes=5))
    unique = events.key_by("id").process(first_of_its_id, forget)
    with LocalCluster(workers=2) as cluster:
        for event in sorted(cluster.run(unique), key=lambda event: event["id"]):
            print(event["id"], event["text"])


if __name__ == "__main__":
    main()
