"""Read results while an endless job runs, and stop it when there is enough.

Use it for jobs without an end, whose rows a program shows or passes on: `submit` returns at once,
`rows()` gives what comes, as it comes, and `cancel` ends the job. Here an endless source gives a
thousand readings a second of two sensors.

Prints::

    5 warnings, all of sensor 1
    the job is canceled
"""

from __future__ import annotations

from itertools import islice

from minishuffle import LocalCluster, Stream


def readings(start: int, count: int) -> list[tuple[int, int]]:
    """Number ``n`` is of sensor ``n % 2``, and says ``n``."""
    return [(n % 2, n) for n in range(start, start + count)]


def main() -> None:
    warnings = Stream.generate(readings, rate=1000).filter(lambda reading: reading[0] == 1)
    with LocalCluster(workers=2) as cluster:
        job = cluster.submit(warnings.collect())
        first = list(islice(job.rows(), 5))
        job.cancel()
        print(len(first), "warnings, all of sensor", *{sensor for sensor, _ in first})
        print("the job is", job.wait_until_over().state)


if __name__ == "__main__":
    main()
