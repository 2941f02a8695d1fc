"""Writes Arrow batches into a stream of a running job, as an upstream on the credit protocol."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from minishuffle.backoff import Backoff
from minishuffle.errors import (
    AuthenticationError,
    PeerLost,
    RemoteProtocolError,
    ShuffleError,
    Superseded,
    TaskCancelled,
    TaskFailed,
    UsageError,
)
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.elements import encode
from minishuffle.exchange.partition import serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.limits import BATCH_ROWS_MAX, WRITER_KEPT_BYTES_MAX, WRITER_UNSTABLE_BYTES_MAX
from minishuffle.protocol.connection import ConnectionEvent, PartitionReleased, PartitionRequested
from minishuffle.remote.access import AWAY_SECONDS_MAX, Access
from minishuffle.remote.connection import ExternalConnection
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.clients import (
    ROWS_FORGOTTEN,
    AbortWrite,
    CommitWrite,
    DescribeStream,
    EndStream,
    OpenUpstream,
    StreamInfo,
    UpstreamOpened,
)
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import JOB_LIVE, JobInfo, ShowJob

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["StreamWriter", "abort_write", "commit_write", "describe_stream", "end_stream"]

OPEN_SECONDS_MAX = 600.0
"""How long an attempt waits for the job to read what an older one had sent, or for a task that restarts."""
ACKNOWLEDGE_LOOK_SECONDS = 1.0
"""Between looks at the connection while nothing is heard from it."""
SUPERSEDED_SECONDS_MAX = 600.0
SUPERSEDED_LOOK_SECONDS = 1.0
RECONNECTS_MAX = 60
"""Connections in a row by which nothing came in."""
RECONNECT_BACKOFF = Backoff(0.05, 1.0)
"""Before another one is tried."""


class _Kept(NamedTuple):
    """Rows from number ``begin`` on that were handed to the connection."""

    begin: int
    batch: pa.RecordBatch

    @property
    def end(self) -> int:
        rows: int = self.batch.num_rows
        return self.begin + rows


class StreamWriter:
    """One attempt at one partition of a write. Rows that an earlier attempt brought in are passed over.

    If its worker is lost, or the task there restarts, the writer connects to the one that takes the place,
    and sends again what the job does not have. It keeps the rows that it wrote last for that
    (``WRITER_KEPT_BYTES_MAX``): more than can be on the way, which is the network buffers of both ends, an
    element, and what the task has taken since the position that the coordinator knows. If rows before them
    are wanted, the attempt fails, and another one brings them.

    In a job that loses nothing the task may go back further, and says which rows are *stable*: none of them
    is asked for again. The writer keeps all others, also those of an earlier attempt that it passes over.
    With ``WRITER_UNSTABLE_BYTES_MAX`` kept it waits until some are stable, between two batches (one may
    exceed the bound). It never fails for that: the job takes snapshots sooner from half of the bound on, and
    as long as none can be taken the writer stands.

    Args:
        write: names the write; the same for all its partitions, and when it is repeated.
        partitions: how many it has, 0 if not known. Watermarks wait for all of them.
        attempt: greater than that of earlier attempts at the partition.

    Raises (on entry):
        UnknownName: no running job reads that stream.
        UsageError: the schema is another one, or the attempt comes too late.
        PeerLost, AuthenticationError: coordinator or worker cannot be reached, or refuses the secret.
    """

    def __init__(
        self,
        access: Access,
        stream: str,
        schema: pa.Schema,
        *,
        write: str,
        partition: int,
        partitions: int,
        attempt: int,
    ) -> None:
        self.rows = 0
        self._access = access
        self._request = OpenUpstream(
            stream=stream,
            write=write,
            partition=partition,
            partitions=partitions,
            attempt=attempt,
            schema_message=schema.serialize().to_pybytes(),
        )
        self._schema = schema
        self._skipped_checksum = 0
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._stable = -1
        """Rows below need not be kept, others must; -1: the last ones are kept. The loop raises it."""
        self._ended = False
        """The program has written everything."""
        self._verifies = True
        """Whether what is passed over is compared with what is there. After a connection was lost that may be
        of this attempt, which has not passed it over."""
        self._reconnects_left = RECONNECTS_MAX
        self._stack = ExitStack()
        self._reply: UpstreamOpened | None = None
        self._connection: ExternalConnection | None = None
        self._written: PipelinedPartition | None = None
        self._attached = False

    def __enter__(self) -> StreamWriter:
        self._reply = self._ask(AWAY_SECONDS_MAX)
        self._note_stable(self._reply.stable)
        if not self._reply.complete:
            try:
                self._connect()
            except (PeerLost, AuthenticationError) as error:
                self._reconnect(error)
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @property
    def _opened(self) -> UpstreamOpened:
        assert self._reply is not None, "use the writer in a with statement"
        return self._reply

    @property
    def _partition(self) -> PipelinedPartition:
        assert self._written is not None, "a complete partition is not written"
        return self._written

    # --- connections -----------------------------------------------------------------------------

    def _ask(self, away_seconds: float = 0.0) -> UpstreamOpened:
        """Where to write, and what is there; waits while the task restarts."""
        reply = self._access.request(self._request, OPEN_SECONDS_MAX, away_seconds=away_seconds)
        if not isinstance(reply, UpstreamOpened):
            raise RemoteProtocolError(f"the coordinator answered with {type(reply).__name__}")
        return reply

    def _connect(self) -> None:
        """Raises PeerLost or AuthenticationError: the worker is gone, or does not expect this ticket."""
        reply = self._opened
        self._stack.close()
        self._attached = False
        connection = ExternalConnection(
            self._access,
            reply.worker,
            self._on_events,
            ticket=reply.ticket,
            term=reply.term,
            segment_bytes=reply.segment_bytes,
        )
        pool = connection.pool.create_pool("output", 2, connection.pool.total)
        self._written = PipelinedPartition(
            PartitionId(JobId(reply.job), 0, self._request.partition),
            range(1),
            lambda: connection.paths.acquire(pool),
            lambda subpartition: connection.paths.notify(subpartition),
            connection.counters,
            flushing=Flush.ADAPTIVE,  # The next write may be long in coming.
            on_stable=lambda row: self._on_stable(connection, row),
        )
        pool.on_available(lambda: connection.paths.bell.ring())
        self._connection = self._stack.enter_context(connection)

    def _on_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        """(Loop.) The worker asks for the partition, or lets it go."""
        for event in events:
            if isinstance(event, PartitionRequested):
                serve(link, event.request, self._partition.subpartitions[0])
                self._attached = True
            elif isinstance(event, PartitionReleased) and self._connection is not None:
                self._connection.paths.bell.ring()

    def _on_stable(self, connection: ExternalConnection, row: int) -> None:
        """(Loop.) Rows below are never asked for again."""
        self._note_stable(row)
        connection.paths.bell.ring()

    def _note_stable(self, row: int) -> None:
        """What was stable once remains so, whatever the next attempt of the task knows of it."""
        self._stable = max(self._stable, row)

    def _reconnect(self, error: ShuffleError) -> None:
        """Go on over another connection, behind what the job has. ``error`` ended the last one.

        Raises:
            TaskFailed: the job has ended.
            Superseded: another attempt has written the partition.
            PeerLost: rows are wanted that are not kept, or no connection lasts.
            ShuffleError: the coordinator refuses the attempt.
        """
        tries = 0
        while self._reconnects_left:
            self._reconnects_left -= 1
            tries += 1
            try:
                self._ask_again()
                if self._opened.complete:
                    self._connection = None
                    if self._ended:
                        return
                    raise Superseded("another attempt has written the partition")
                self._check_kept(error)
                self._connect()
                self._send_again()
                return
            except (PeerLost, AuthenticationError, TaskCancelled) as again:
                error = error if isinstance(again, TaskCancelled) else again
                time.sleep(RECONNECT_BACKOFF.seconds(tries))
        raise error

    def _ask_again(self) -> None:
        """Where to write now. While a newer attempt writes this one waits: Spark starts a third for an
        attempt that fails while another copy of it runs, and ends a copy that is late."""
        before = self._opened.rows
        change = {"connection": self._request.connection + 1, "sent": max(before, self.rows)}
        self._request = self._request.model_copy(update=change)
        deadline = time.monotonic() + SUPERSEDED_SECONDS_MAX
        while True:
            self._check_job()
            try:
                self._reply = self._ask()
                break
            except Superseded:
                if time.monotonic() > deadline:
                    raise
                self._request = self._request.model_copy(update={"sent": -1})
                time.sleep(SUPERSEDED_LOOK_SECONDS)
            except UsageError:
                self._check_job()  # its end may be the reason, and knows the cause
                raise
        self._note_stable(self._opened.stable)
        if self._opened.rows > before:
            self._reconnects_left = RECONNECTS_MAX
        self._verifies = self._verifies and not self.rows

    def _check_job(self) -> None:
        """Raises TaskFailed: the job has ended, or is about to."""
        job = self._access.request(ShowJob(job=self._opened.job))
        if isinstance(job, JobInfo) and job.state not in JOB_LIVE:
            cause = f": {job.causes[0].text}" if job.causes else ""
            raise TaskFailed(
                f"job {job.job} ({job.name}) is {job.state}, and its stream {self._request.stream!r} is "
                f"still being written{cause}"
            )

    def _check_kept(self, error: ShuffleError) -> None:
        """Raises ``error``: rows that are wanted again are not kept."""
        begin = self._kept[0].begin if self._kept else self.rows
        if self._opened.rows < begin:
            self._reconnects_left = 0
            raise error

    def _send_again(self) -> None:
        """Raises TaskCancelled: the connection has ended."""
        at = self._opened.rows
        self._forget(at if self._stable < 0 else self._stable)
        for kept in list(self._kept):
            if kept.end > at:
                rest = kept.batch.slice(max(0, at - kept.begin))
                self._partition.write(0, *encode(Batch(rest), narrows=False))
        if self._ended:
            self._send_end()

    def _send_end(self) -> None:
        self._partition.finish()

    # --- the program's thread --------------------------------------------------------------------

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch; waits while the job takes nothing, or the task that takes it restarts, and while as
        much is kept as may be.

        Raises:
            UsageError: its schema is not the stream's, or a retry brings other rows than were there.
            TaskFailed: the job has ended.
            PeerLost: the connection is gone for good; the attempt can be repeated.
        """
        if not batch.schema.equals(self._schema):
            raise UsageError(f"the batch has the columns {batch.schema}, the stream {self._schema}")
        for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
            piece = batch.slice(start, BATCH_ROWS_MAX)
            while rows := piece.num_rows:
                self._await_room()  # before the next look at what is there: it may be less then
                count = self._rows_of_a_kind(rows)
                self._write_piece(piece.slice(0, count))
                piece = piece.slice(count)

    def _rows_of_a_kind(self, rows: int) -> int:
        """How many of the next rows are passed over, or sent, as the first of them is. Where they are
        compared none are cut off: what is there ends with a batch, or is not the same."""
        opened = self._opened
        ends = [opened.base] if self._verifies else [opened.base, opened.rows]
        return min([rows, *(end - self.rows for end in ends if end > self.rows)])

    def _write_piece(self, piece: pa.RecordBatch) -> None:
        begin = self.rows
        self.rows += piece.num_rows
        connection, is_there = self._connection, begin < self._opened.rows
        if connection is not None and (self.rows > self._stable if self._stable >= 0 else not is_there):
            self._keep(_Kept(begin, piece))
        if is_there:
            self._pass_over(piece, begin)
            return
        if connection is None:
            return
        try:
            # What is on the way must not be more than what is kept, which is counted in the batches' bytes.
            self._partition.write(0, *encode(Batch(piece), narrows=False))
        except TaskCancelled:
            self._reconnect(connection.error or PeerLost("the connection is gone"))

    def _pass_over(self, piece: pa.RecordBatch, begin: int) -> None:
        if begin >= self._opened.base:
            for part in encode(Batch(piece), narrows=False)[1][1:]:
                self._skipped_checksum = zlib.crc32(part, self._skipped_checksum)
        if self.rows >= self._opened.rows:
            self._check_skipped()

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._kept_bytes += kept.batch.nbytes
        while self._stable < 0 and self._kept_bytes > WRITER_KEPT_BYTES_MAX and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popleft().batch.nbytes

    def _forget(self, row: int) -> None:
        """Keep no batch of which all rows are below that one."""
        while self._kept and self._kept[0].end <= row:
            self._kept_bytes -= self._kept.popleft().batch.nbytes

    def _await_room(self) -> None:
        """Wait until less is kept than may be.

        Raises: as :meth:`write`.
        """
        while (connection := self._connection) is not None and self._stable >= 0:
            connection.paths.bell.clear()
            self._forget(self._stable)
            if self._kept_bytes < WRITER_UNSTABLE_BYTES_MAX:
                return
            if connection.error is not None:
                self._reconnect(connection.error)
            else:
                connection.paths.bell.wait(ACKNOWLEDGE_LOOK_SECONDS)

    def _check_skipped(self) -> None:
        opened = self._opened
        if opened.complete or not self._verifies:
            return
        if (self.rows, self._skipped_checksum) != (opened.rows, opened.checksum):
            raise UsageError(
                f"partition {self._request.partition} gave other rows than in the attempt before, of which "
                f"{opened.rows} had been delivered: make their order certain, for example with "
                "sortWithinPartitions on columns that tell all rows apart"
            )

    def _check_complete(self) -> None:
        """At the end: an attempt that had fewer rows, or as many as a complete partition has.

        Only the number is compared where nothing is left to deliver: a partition may come in another order.
        Rows below ``base`` need not have existed: the lease that was lost with a worker ended there.
        """
        opened = self._opened
        if not opened.complete and (opened.base < self.rows or not opened.base) and self.rows < opened.rows:
            self._check_skipped()
        if opened.complete and not opened.base and opened.rows not in (ROWS_FORGOTTEN, self.rows):
            raise UsageError(
                f"partition {self._request.partition} has {self.rows} rows, and {opened.rows} were delivered "
                f"before in the write {self._request.write}: repeat it with the same "
                "partitions, from the same files and with as many cores"
            )

    def finish(self) -> int:
        """Wait until the job has taken everything; gives the rows of the partition.

        Raises: as :meth:`write`.
        """
        self._check_complete()
        if self._connection is not None:
            self._ended = True
            self._send_end()
        while (connection := self._connection) is not None:
            connection.paths.bell.clear()
            if connection.error is not None:
                self._reconnect(connection.error)
                continue
            subpartition = self._partition.subpartitions[0]
            if not self._attached or subpartition.view is not None:
                connection.paths.bell.wait(ACKNOWLEDGE_LOOK_SECONDS)
                continue
            connection.settle()  # by then a link that broke has said so, and a channel whether it was read
            if connection.error is None:
                if subpartition.closed:
                    break
                self._reconnect(PeerLost("the task has let go of the partition before its end"))
        return self.rows


def _request(
    access: Access, message: ControlMessage, away_seconds: float = AWAY_SECONDS_MAX
) -> ControlMessage:
    return access.request(message, OPEN_SECONDS_MAX, away_seconds=away_seconds)


def describe_stream(access: Access, stream: str) -> StreamInfo:
    """What there is to write to; no coordinator is waited for.

    Raises:
        UnknownName: no running job reads that stream.
        PeerLost: the coordinator cannot be reached.
    """
    info = _request(access, DescribeStream(stream=stream), away_seconds=0.0)
    if not isinstance(info, StreamInfo):
        raise RemoteProtocolError(f"the coordinator answered with {type(info).__name__}")
    return info


def commit_write(access: Access, stream: str, write: str, partitions: Sequence[int]) -> None:
    """All partitions of the write are written: a bounded stream ends.

    Raises:
        UsageError: some are not complete.
    """
    _request(access, CommitWrite(stream=stream, write=write, partitions=list(partitions)))


def abort_write(access: Access, stream: str, write: str, reason: str) -> None:
    """The write is given up: the job that reads a bounded stream fails."""
    _request(access, AbortWrite(stream=stream, write=write, reason=reason))


def end_stream(access: Access, stream: str) -> None:
    """Nothing more is written into the stream, bounded or not: its job comes to its end."""
    _request(access, EndStream(stream=stream))
