"""Cut what each user does into visits: a visit ends when the user does nothing for half an hour.

Use it to count visits, how long they last and what is done in them. `fold` makes one value of the
events of a visit, here the pages in their order.

Prints::

    ann 09:00 to 09:50: home, shoes, cart
    ann 11:00 to 11:30: home
    bob 09:10 to 09:40: home
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from minishuffle import LocalCluster, Stream

MORNING = datetime(2026, 1, 1, 9, tzinfo=UTC)
VIEWS = [
    ("ann", 0, "home"),
    ("bob", 10, "home"),
    ("ann", 12, "shoes"),
    ("ann", 20, "cart"),
    ("ann", 120, "home"),
]


def with_page(pages: list[str], view: dict[str, Any]) -> list[str]:
    return [*pages, view["page"]]


def main() -> None:
    rows = [{"user": user, "at": MORNING + timedelta(minutes=m), "page": page} for user, m, page in VIEWS]
    views = Stream.items(rows).event_time("at", out_of_order=timedelta(minutes=5))
    visits = views.key_by("user").session_window(timedelta(minutes=30)).fold(list, with_page)
    with LocalCluster(workers=2) as cluster:
        for user, start, end, pages in sorted(cluster.run(visits)):
            print(f"{user} {start:%H:%M} to {end:%H:%M}: {', '.join(pages)}")


if __name__ == "__main__":
    main()
