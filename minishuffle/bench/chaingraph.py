"""The job of ``bench recovery --graph chain``: all kinds of state between sources and files, on every worker.

Two sources that can be read again, an inner join of their numbers, a second exchange by key, windows of event
time, Parquet files; parallelism 4, so that each worker has a subtask of everything and none is special. What
the files hold is compared with a reference in plain Python, computed from what the sources are defined to
make. A log beside the windows says when each record came, as that of :mod:`~minishuffle.bench.numbered` does.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.parquet as pq

from minishuffle.api.stream import KeyedStream, Stream
from minishuffle.bench.numbered import KEYS, Log, NumberedOutput, NumberedRun, OutputAudit, asked_in
from minishuffle.bench.stalls import Span
from minishuffle.exchange.batch import Payload
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.wire.requests import JobInfo, TaskInfo

__all__ = ["ChainRun", "Rereadable", "audit_windows", "chain_job"]

PARALLELISM: Final = 4
WINDOW: Final = timedelta(seconds=1)
WITHIN: Final = timedelta(milliseconds=100)
"""Between the two rows of a pair, which have one time: how long the join holds its rows."""
FILE_SECONDS: Final = 1.0
REST_SECONDS_MAX: Final = 0.05
LEAD_SECONDS: Final = 2.0
"""The last record is due so long after it has been said which one that is: no source is there already."""


# --- the job --------------------------------------------------------------------------------------


def micros_of(number: int, rate: float) -> int:
    """The event time of a record: these run as fast as the clock, from 1970 on."""
    return int(number * 1e6 / rate)


class Rereadable:
    """Source of records (number, event time), ``rate`` per second in all; record ``number`` is in split
    ``number`` mod 4. Each is due at a time that no restart changes: what is overdue comes at once.

    Args:
        begin: monotonic nanoseconds at which record 0 is due.
        stop: the file that says before which number the records end, once it is there.
    """

    format = "rows"
    bounded = False

    def __init__(self, begin: int, rate: float, stop: str) -> None:
        self._begin, self._rate, self._stop = begin, rate, Path(stop)

    def splits(self) -> Sequence[int]:
        return range(PARALLELISM)

    def read(self, split: int, offset: int) -> Iterator[Payload]:
        number = split + offset * PARALLELISM
        while number < (end := self._end()):
            seconds = (time.monotonic_ns() - self._begin) / 1e9
            due = min(end, int(seconds * self._rate) + 1, number + BATCH_ROWS_MAX * PARALLELISM)
            if due <= number:
                time.sleep(min(REST_SECONDS_MAX, max(0.0, number / self._rate - seconds)))
                continue
            found = range(number, int(due), PARALLELISM)
            yield [(each, micros_of(each, self._rate)) for each in found]
            number = found[-1] + PARALLELISM

    def _end(self) -> float:
        try:
            return int(self._stop.read_text())
        except FileNotFoundError:
            return math.inf


def chain_job(begin: int, rate: float, directory: str) -> Stream[Any]:
    """The job; its keyed subtasks do what :func:`~minishuffle.bench.numbered.asked_in` says."""

    def numbers(name: str) -> KeyedStream[int, Any]:
        source = Stream.source(Rereadable(begin, rate, f"{directory}/stop")).name(name)
        return source.event_time(lambda row: row[1]).key_by(lambda row: row[0])

    def add(numbers: list[int], row: tuple[int, int]) -> list[int]:
        return [*numbers, row[1]]

    pairs = numbers("left").join(numbers("right"), within=WITHIN).map(lambda pair: (pair[0] % KEYS, pair[0]))
    keyed = pairs.key_by(lambda row: row[0])
    noted = keyed.process(asked_in(directory, PARALLELISM)).to(Log(f"{directory}/log", held=0))
    windows = keyed.window(WINDOW).fold(list, add)
    rows = windows.map(lambda found: {"key": found[0], "start": found[1], "numbers": found[2]})
    return Stream.together(noted, rows.to_files(f"{directory}/out", seconds=FILE_SECONDS))


# --- while it runs --------------------------------------------------------------------------------


class ChainRun(NumberedRun):
    """That job on a cluster of its own; any worker may be the victim."""

    parallelism = PARALLELISM

    def _job(self) -> Stream[Any]:
        self._begin = time.monotonic_ns()
        return chain_job(self._begin, self._rate, str(self._directory))

    def _spared(self, tasks: Iterable[TaskInfo]) -> int:
        return 0

    def output(self, stalls: Sequence[Span] = ()) -> NumberedOutput:
        """What has been logged so far."""
        return self._output(self._begin, stalls)

    def end(self) -> tuple[JobInfo, int]:
        """Have the job end; gives how many records each of its sources made, too.

        Raises:
            ShuffleError: it ended in another way than it should.
        """
        count = math.ceil(((time.monotonic_ns() - self._begin) / 1e9 + LEAD_SECONDS) * self._rate)
        written = self._directory / "stopping"
        written.write_text(str(count))
        written.rename(self._directory / "stop")
        return self._wait_for_end(), count

    def audit(self, count: int) -> OutputAudit:
        """What its files have of the first ``count`` records, once it has ended."""
        return audit_windows(read_windows(self._listed()), count, self._rate)

    def _listed(self) -> Iterator[Path]:
        """Each file in the manifest, under its name or a hidden one."""
        for each in self.handle.files():
            path = Path(each.path)
            yield path if path.exists() else next(path.parent.glob(f".*{path.name}"))


# --- what it shows --------------------------------------------------------------------------------


class Window(NamedTuple):
    """What a row of the files says: the records of a key in a window, which begins at that microsecond."""

    key: int
    start: int
    numbers: Sequence[int]


def read_windows(paths: Iterable[Path]) -> Iterator[Window]:
    for path in paths:
        for row in pq.read_table(path).to_pylist():
            start = row["start"].replace(tzinfo=UTC) - datetime.fromtimestamp(0, UTC)
            yield Window(row["key"], start // timedelta(microseconds=1), row["numbers"])


def audit_windows(rows: Iterable[Window], count: int, rate: float) -> OutputAudit:
    """Compare rows with what the first ``count`` records come to, in plain Python. One that the best row of
    its key and window lacks is lost, whatever other rows have."""
    expected = defaultdict[tuple[int, int], set[int]](set)
    size = WINDOW // timedelta(microseconds=1)
    for number in range(count):
        expected[number % KEYS, micros_of(number, rate) // size * size].add(number)
    best = Counter[tuple[int, int]]()
    again = wrong = 0
    for row in rows:
        place = row.key, row.start
        right = [number for number in row.numbers if number in expected.get(place, ())]
        again += len(right)
        wrong += len(row.numbers) - len(right)
        best[place] = max(best[place], len(set(right)))
    return OutputAudit(count - best.total(), again - best.total(), wrong)
