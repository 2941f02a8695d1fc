"""Part the input into good rows, rows for another path, and rows that raise.

Use it so that one bad row neither ends the job nor disappears. `Aside` sends a row to a side output
of your choice; `on_error="side"` sends each row for which the function raises, with the error, to
`.errors`.

Prints::

    good: ('ann', 12.5)
    review: bob,7000
    bad: 'cy' (not enough values to unpack (expected 2, got 1))
    bad: 'dan,x' (could not convert string to float: 'x')
"""

from __future__ import annotations

from minishuffle import Aside, LocalCluster, Stream

LINES = ["ann,12.5", "bob,7000", "cy", "dan,x"]


def order(line: str) -> tuple[str, float] | Aside:
    name, amount = line.split(",")
    if float(amount) > 1000:
        return Aside("review", line)
    return name, float(amount)


def main() -> None:
    orders = Stream.items(LINES).map(order, sides=["review"], on_error="side")
    job = Stream.together(
        orders.collect("good"),
        orders.side("review").collect("review"),
        orders.errors.collect("bad"),
    )
    with LocalCluster(workers=2) as cluster:
        collected = cluster.submit(job).wait().collected
    print("good:", *collected["good"])
    print("review:", *collected["review"])
    for row in sorted(collected["bad"], key=lambda row: str(row["record"])):
        print(f"bad: {row['record']!r} ({row['error'].removeprefix('ValueError: ')})")


if __name__ == "__main__":
    main()
