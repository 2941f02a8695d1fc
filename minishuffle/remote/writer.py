"""Writes Arrow batches into a stream of a running job, as an upstream on the credit protocol."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

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
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.elements import encode
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.subpartition import serve
from minishuffle.ids import JobId, PartitionId
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.protocol.connection import ConnectionEvent, PartitionRequested
from minishuffle.remote.access import Access
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
from minishuffle.wire.frames import EventKind
from minishuffle.wire.messages import ControlMessage, JobInfo, ShowJob

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["StreamWriter", "abort_write", "commit_write", "describe_stream", "end_stream"]

OPEN_SECONDS_MAX = 600.0
"""How long an attempt waits for the job to read what an older one had sent."""
ACKNOWLEDGE_LOOK_SECONDS = 0.02
SUPERSEDED_SECONDS_MAX = 600.0
SUPERSEDED_LOOK_SECONDS = 1.0


class StreamWriter:
    """One attempt at one partition of a write. Rows that an earlier attempt brought in are passed over.

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
        self._stack = ExitStack()
        self._reply: UpstreamOpened | None = None
        self._connection: ExternalConnection | None = None
        self._written: ResultPartition | None = None
        self._attached = False

    def __enter__(self) -> StreamWriter:
        with self._access.control() as control:
            reply = control.request(self._request, OPEN_SECONDS_MAX)
        if not isinstance(reply, UpstreamOpened):
            raise RemoteProtocolError(f"the coordinator answered with {type(reply).__name__}")
        self._reply = reply
        if not reply.complete:
            connection = ExternalConnection(
                self._access,
                reply.worker,
                self._on_events,
                ticket=reply.ticket,
                term=reply.term,
                segment_bytes=reply.segment_bytes,
            )
            pool = connection.pool.create_pool("output", 2, connection.pool.total)
            self._written = ResultPartition(
                PartitionId(JobId(reply.job), 0, self._request.partition),
                range(1),
                lambda: connection.paths.acquire(pool),
                lambda subpartition: connection.paths.notify(subpartition),
                connection.counters,
                flushing=Flush.ADAPTIVE,  # The next write may be long in coming.
            )
            pool.on_available(lambda: connection.paths.bell.ring())
            try:
                self._connection = self._stack.enter_context(connection)
            except (PeerLost, AuthenticationError) as error:
                raise self._explained(error) from error
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @property
    def _opened(self) -> UpstreamOpened:
        assert self._reply is not None, "use the writer in a with statement"
        return self._reply

    @property
    def _partition(self) -> ResultPartition:
        assert self._written is not None, "a complete partition is not written"
        return self._written

    def _on_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        """(Loop.) The worker asks for the partition."""
        for event in events:
            if isinstance(event, PartitionRequested):
                serve(link, event.request, self._partition.subpartitions[0])
                self._attached = True

    # --- the program's thread --------------------------------------------------------------------

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch; waits while the job takes nothing.

        Raises:
            UsageError: its schema is not the stream's, or a retry brings other rows than were there.
            PeerLost: the connection is gone; the attempt can be repeated.
        """
        if not batch.schema.equals(self._schema):
            raise UsageError(f"the batch has the columns {batch.schema}, the stream {self._schema}")
        for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
            self._write_piece(batch.slice(start, BATCH_ROWS_MAX))

    def _write_piece(self, piece: pa.RecordBatch) -> None:
        rows, parts = encode(piece)
        begin = self.rows
        self.rows += rows
        if begin < self._opened.rows:
            for part in parts[1:]:
                self._skipped_checksum = zlib.crc32(part, self._skipped_checksum)
            if self.rows >= self._opened.rows:
                self._check_skipped()
            return
        connection = self._connection
        if connection is None:
            return
        try:
            self._partition.write(0, rows, parts)
        except TaskCancelled:
            raise self._explained(connection.error or PeerLost("the connection is gone")) from None

    def _check_skipped(self) -> None:
        opened = self._opened
        if opened.complete:
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
        """
        opened = self._opened
        if not opened.complete and self.rows < opened.rows:
            self._check_skipped()
        if opened.complete and opened.rows not in (ROWS_FORGOTTEN, self.rows):
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
        connection = self._connection
        if connection is not None:
            self._partition.broadcast_event(EventKind.END_OF_DATA)
            self._partition.broadcast_event(EventKind.END_OF_PARTITION)
            while not self._released() and connection.error is None:
                connection.paths.bell.clear()
                connection.paths.bell.wait(ACKNOWLEDGE_LOOK_SECONDS)
            connection.settle()  # a link that broke has said so by then
            if connection.error is not None:
                why = self._explained(connection.error)
                if not self._opened.complete:
                    raise why
        return self.rows

    def _explained(self, error: ShuffleError) -> ShuffleError:
        """Why the connection is gone: the job may be over, or a newer attempt have taken over.

        In that case this one waits until that one is done: Spark starts a third for an attempt that fails
        while another copy of it runs, and ends a copy that is late.
        """
        deadline = time.monotonic() + SUPERSEDED_SECONDS_MAX
        while True:
            try:
                with self._access.control() as control:
                    job = control.request(ShowJob(job=self._opened.job))
                    if isinstance(job, JobInfo) and job.state not in ("created", "running"):
                        cause = f": {job.causes[0].text}" if job.causes else ""
                        return TaskFailed(
                            f"job {job.job} ({job.name}) is {job.state}, and its stream "
                            f"{self._request.stream!r} is still being written{cause}"
                        )
                    reply = control.request(self._request, OPEN_SECONDS_MAX)
            except Superseded as superseded:
                if time.monotonic() > deadline:
                    return superseded
                time.sleep(SUPERSEDED_LOOK_SECONDS)
            except ShuffleError as other:
                return other if not isinstance(other, PeerLost) else error
            else:
                if isinstance(reply, UpstreamOpened) and reply.complete:
                    self._reply = reply
                    return Superseded("another attempt has written the partition")
                return error

    def _released(self) -> bool:
        """The job has read to the end and closed the channel, or the connection is gone."""
        return self._attached and self._partition.subpartitions[0].view is None


def _request(access: Access, message: ControlMessage) -> ControlMessage:
    with access.control() as control:
        return control.request(message, OPEN_SECONDS_MAX)


def describe_stream(access: Access, stream: str) -> StreamInfo:
    """Raises UnknownName: no running job reads that stream."""
    info = _request(access, DescribeStream(stream=stream))
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
