"""What a writer keeps for a job that loses nothing: until it is stable, and up to where it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, ShuffleError, TaskCancelled
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.exchange.subpartition import PipelinedView
from minishuffle.remote import writer as writing
from minishuffle.remote.writer import StreamWriter
from minishuffle.wire.clients import OpenUpstream, UpstreamOpened
from minishuffle.wire.messages import WorkerAddress
from minishuffle.wire.requests import JobInfo

SCHEMA = pa.schema([("n", pa.int64())])
PIECE = 10
BOUND = 3 * PIECE * 8
"""Three pieces."""


class Waited(Exception):
    """The program waits, and the test has nothing more for it to hear."""


class Connection:
    """A connection to a worker that takes whatever is sent. While the program waits on it, the next of the
    test's ``events`` happens."""

    def __init__(
        self, access: Access, worker: Any, on_events: Any, *, segment_bytes: int, **about: Any
    ) -> None:
        self.error: ShuffleError | None = None
        self.counters = TaskCounters()
        self.pool = NetworkBufferPool(64, segment_bytes)
        self.paths = SimpleNamespace(
            acquire=self._acquire,
            notify=lambda subpartition: None,
            bell=SimpleNamespace(ring=lambda: None, clear=lambda: None, wait=self._wait),
        )
        self._events = access.events
        access.connections.append(self)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def _acquire(self, pool: Any) -> Any:
        if self.error is not None:
            raise TaskCancelled("the connection is gone")
        return pool.request()

    def _wait(self, seconds: float) -> None:
        if not self._events:
            raise Waited
        self._events.pop(0)()

    @property
    def rows(self) -> int:
        """That were sent."""
        return self.counters.records_out


class Access:
    """A coordinator whose job's task has so many rows of the partition, of which so many are stable; -1: it
    says nothing of that."""

    def __init__(self, *, rows: int = 0, stable: int = 0) -> None:
        self.rows, self.stable = rows, stable
        self.connections: list[Connection] = []
        self.events: list[Callable[[], None]] = []

    def request(self, message: Any, seconds: float = 0.0, *, away_seconds: float = 0.0) -> Any:
        if not isinstance(message, OpenUpstream):
            return JobInfo.model_construct(job="j1", name="job", state="running", causes=[], submitted_at=0.0)
        return UpstreamOpened(
            term=1,
            ticket=1,
            job="j1",
            worker=WorkerAddress(worker=1, epoch=1, host="127.0.0.1", data_port=1),
            rows=self.rows,
            checksum=0,
            complete=False,
            segment_bytes=4096,
            stable=self.stable,
        )

    def restart(self, rows: int) -> None:
        """The task has restarted behind so many rows, and knows of none that is stable."""
        self.rows, self.stable = rows, 0
        self.connections[-1].error = PeerLost("the worker is gone")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "WRITER_KEPT_BYTES_MAX", BOUND)
    monkeypatch.setattr(writing, "WRITER_UNSTABLE_BYTES_MAX", BOUND)
    monkeypatch.setattr(writing, "ExternalConnection", Connection)
    monkeypatch.setattr(writing, "RECONNECT_BACKOFF", SimpleNamespace(seconds=lambda tries: 0.0))


@pytest.fixture
def make() -> Iterator[Callable[[Any], StreamWriter]]:
    made: list[StreamWriter] = []

    def make(access: Any) -> StreamWriter:
        writer = StreamWriter(access, "orders", SCHEMA, write="w", partition=0, partitions=1, attempt=1)
        made.append(writer.__enter__())
        return writer

    yield make
    for writer in made:
        writer.__exit__()


def write(writer: StreamWriter, pieces: int = 1) -> None:
    for _ in range(pieces):
        first = writer.rows
        writer.write(pa.record_batch([pa.array(range(first, first + PIECE), pa.int64())], schema=SCHEMA))


def say_stable(writer: StreamWriter, rows: int) -> None:
    """The worker's word comes in, on the channel by which it reads."""
    subpartition = writer._partition.subpartitions[0]
    view = subpartition.view or subpartition.attach(1, lambda: None)
    assert isinstance(view, PipelinedView)
    view.make_stable(0, rows)


def test_a_writer_waits_at_its_bound_until_rows_are_stable(make: Any) -> None:
    access = Access()
    writer = make(access)
    write(writer, 3)
    with pytest.raises(Waited):
        write(writer)
    assert writer.rows == 3 * PIECE, "of the fourth nothing was sent"
    heard = [lambda: say_stable(writer, PIECE - 1), lambda: say_stable(writer, 2 * PIECE)]
    access.events += heard
    write(writer)
    assert not access.events and access.connections[0].rows == 4 * PIECE
    write(writer)
    with pytest.raises(Waited):
        write(writer)


def test_one_batch_may_exceed_the_bound(make: Any) -> None:
    """Else nobody could write it."""
    access = Access()
    writer = make(access)
    writer.write(pa.record_batch([pa.array(range(2 * BOUND), pa.int64())], schema=SCHEMA))
    assert access.connections[0].rows == 2 * BOUND
    with pytest.raises(Waited):
        write(writer)


def test_whatever_is_asked_for_behind_what_is_stable_is_sent_again(make: Any) -> None:
    """Also by a writer that waits at its bound, and though the next attempt of the task knows less."""
    access = Access()
    writer = make(access)
    write(writer, 3)
    say_stable(writer, PIECE)
    write(writer)
    access.events += [lambda: access.restart(PIECE)]
    access.events += [lambda: say_stable(writer, 4 * PIECE)]
    write(writer)
    assert [each.rows for each in access.connections] == [4 * PIECE, 4 * PIECE]
    access.restart(4 * PIECE)
    writer._reconnect(PeerLost("the worker is gone"))
    assert access.connections[-1].rows == PIECE


def test_what_a_task_has_is_kept_as_long_as_the_job_may_go_back_behind_it(make: Any) -> None:
    access = Access()
    writer = make(access)
    write(writer, 3)
    for rows, sent in ((3 * PIECE, 0), (PIECE, 2 * PIECE)):
        access.rows = rows
        writer._reconnect(PeerLost("the worker is gone"))
        assert access.connections[-1].rows == sent


def test_rows_that_are_passed_over_are_kept_until_they_are_stable(make: Any) -> None:
    """They were taken from an attempt before, and no snapshot has them."""
    access = Access(rows=5 * PIECE, stable=PIECE)
    writer = make(access)
    write(writer, 4)
    assert access.connections[0].rows == 0
    with pytest.raises(Waited):
        write(writer)
    access.events += [lambda: access.restart(2 * PIECE), lambda: say_stable(writer, 3 * PIECE)]
    write(writer)
    assert access.connections[-1].rows == 3 * PIECE, "the third, the fourth, and the one that is written"


def test_where_rows_may_be_lost_a_writer_keeps_the_last_and_does_not_wait(make: Any) -> None:
    access = Access(stable=-1)
    writer = make(access)
    write(writer, 20)
    access.rows = 18 * PIECE
    writer._reconnect(PeerLost("the worker is gone"))
    assert access.connections[-1].rows == 2 * PIECE
    access.rows = 5 * PIECE
    with pytest.raises(PeerLost):
        writer._reconnect(PeerLost("the worker is gone"))
