"""Count events by the hour, and keep those that come too late for their hour in a stream of their own.

Use it where nothing may disappear: the windows wait ten minutes for stragglers (`out_of_order`),
and with `late="side"` what comes later yet goes to `.late`, to be stored, counted or added to the
totals afterwards.

Prints::

    ann 08:00 2
    bob 09:00 2
    late: bob 08:55
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from minishuffle import LocalCluster, Stream

LINES = """\
2026-01-01 08:10,ann
2026-01-01 09:05,bob
2026-01-01 08:57,ann
2026-01-01 09:30,bob
2026-01-01 08:55,bob
"""


def parsed(line: str) -> dict[str, Any]:
    at, user = line.split(",")
    return {"at": datetime.strptime(at, "%Y-%m-%d %H:%M").replace(tzinfo=UTC), "user": user}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=2) as cluster:
        file = Path(folder, "events.csv")
        file.write_text(LINES)
        events = Stream.text(file, parallelism=1).map(parsed).parallel(1)
        timed = events.event_time("at", out_of_order=timedelta(minutes=10), watermarks="each")
        hours = timed.key_by("user").window(timedelta(hours=1), late="side").count()
        result = cluster.submit(Stream.together(hours.collect("hours"), hours.late.collect("late"))).wait()
    for user, hour, number in sorted(result.collected["hours"]):
        print(f"{user} {hour:%H:%M} {number}")
    for event in result.collected["late"]:
        print(f"late: {event['user']} {event['at']:%H:%M}")


if __name__ == "__main__":
    main()
