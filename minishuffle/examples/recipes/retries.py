"""Call a service that fails now and then: several calls at a time, each tried again, and the rest set aside.

Use it for lookups over HTTP or in a database. `map_async` keeps `concurrency` calls under way and
gives the answers in the order of the rows; `timeout` bounds all tries of a row. Rows whose last try
fails become dead letters: their errors are lines of the job's log.

Prints::

    ['city 1', 'city 2', 'city 4']
    dead letter: call: ConnectionError: no answer: record 3
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from minishuffle import LocalCluster, Stream, TaskContext

TRIES = 3
PAUSE_SECONDS = 0.01


class Service:
    """Stands for a client of yours: each first call fails, and all calls for 3."""

    def __init__(self) -> None:
        self.called: set[int] = set()

    async def city(self, number: int) -> str:
        if number == 3 or number not in self.called:
            self.called.add(number)
            raise ConnectionError("no answer")
        return f"city {number}"


class Call:
    async def open(self, context: TaskContext) -> None:
        """Once for each subtask, on the loop of its calls: the place to open a session."""
        self.service = Service()

    async def __call__(self, number: int) -> str:
        for attempt in range(1, TRIES):
            try:
                return await self.service.city(number)
            except ConnectionError:
                await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
        return await self.service.city(number)


def main() -> None:
    numbers = Stream.items([1, 2, 3, 4])
    cities = numbers.map_async(Call(), concurrency=10, timeout=timedelta(seconds=30), on_error="dead_letter")
    with LocalCluster(workers=2) as cluster:
        job = cluster.submit(cities.name("call").collect())
        print(sorted(job.wait().rows))
        print(*job.logs(), sep="\n")


if __name__ == "__main__":
    main()
