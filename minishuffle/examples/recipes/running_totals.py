"""Keep a total for each account, and give it out after every booking.

Use it for balances, counters and other state that somebody watches while the data flow:
`emit="each"` gives each intermediate value. Without it, data that have an end give the last value
alone. Bookings of one account stay in order where one subtask reads them.

Prints::

    ann [5, 3, 13]
    bob [7, 8]
"""

from __future__ import annotations

from minishuffle import LocalCluster, Stream

BOOKINGS = [("ann", 5), ("bob", 7), ("ann", -2), ("bob", 1), ("ann", 10)]


def add(total: int, booking: tuple[str, int]) -> int:
    return total + booking[1]


def main() -> None:
    bookings = Stream.items(BOOKINGS).parallel(1)
    totals = bookings.key_by(lambda booking: booking[0]).fold(int, add, emit="each")
    seen: dict[str, list[int]] = {}
    with LocalCluster(workers=2) as cluster:
        for account, total in cluster.run(totals):
            seen.setdefault(account, []).append(total)
    for account in sorted(seen):
        print(account, seen[account])


if __name__ == "__main__":
    main()
