"""Reads rows that a sink kept, as a consumer on the credit protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from minishuffle import limits
from minishuffle.errors import PeerLost, RemoteProtocolError, RowsLost, TaskCancelled, TaskFailed
from minishuffle.exchange.elements import AssemblyBudget, decode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.connection import ConnectionEvent
from minishuffle.remote.access import AWAY_SECONDS_MAX, Access
from minishuffle.remote.connection import ExternalConnection
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.clients import CommitResult, DescribeResult, OpenResult, ResultDescribed, ResultOpened
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.requests import Accepted, WaitJob

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ResultInfo", "ResultReader", "SubtaskRows", "commit_result", "describe_result", "wait_result"]


# --- results --------------------------------------------------------------------------------------
#
# What a program asks of results that a job's sinks keep for it: what there is, and that it was read.


LONG_POLL_SECONDS: Final = 5.0


class SubtaskRows(NamedTuple):
    """Rows ``begin`` to ``end`` of a sink's subtask can be read, but for those that are lost."""

    subtask: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ResultInfo:
    """What a sink of a job keeps."""

    job: str
    """Its id."""
    name: str
    sink: str
    schema: pa.Schema
    bounded: bool
    """Whether the job's data come to an end."""
    state: str
    """created, running, finished, failing, failed, canceling or canceled."""
    terminal: bool
    """The job writes no more: ``subtasks`` is final."""
    submitted_at: float
    """Seconds since 1970; tells jobs of one id apart, since every coordinator counts from 1."""
    cause: str
    """Why the job failed; empty for any other job."""
    subtasks: list[SubtaskRows]
    """While the job runs: what there was at the last heartbeats."""
    rows_lost: int = 0
    """Rows among these that are lost with the workers that kept them."""

    @property
    def rows(self) -> int:
        """That can be read."""
        return sum(rows.end - rows.begin for rows in self.subtasks) - self.rows_lost


def describe_result(
    access: Access, job: str, sink: str | None = None, *, away_seconds: float = 0.0
) -> ResultInfo:
    """What there is to read now.

    Args:
        away_seconds: how long to wait for a coordinator that is started again.
        job: an id, or a name: the newest job of it.
        sink: the name given to ``to_spark``; may be left out if the job has one only.

    Raises:
        UnknownName: there is no such job or sink, or the job keeps nothing for other programs.
        UsageError: the results were given up in favour of newer jobs'.
        PeerLost: the coordinator cannot be reached.
    """
    import pyarrow as pa

    reply = access.request(DescribeResult(job=job, sink=sink or ""), away_seconds=away_seconds)
    if not isinstance(reply, ResultDescribed):
        raise RemoteProtocolError(f"the coordinator answered with {type(reply).__name__}")
    return ResultInfo(
        job=reply.job,
        name=reply.name,
        sink=reply.sink,
        schema=pa.ipc.read_schema(pa.py_buffer(reply.schema_message)),
        bounded=reply.bounded,
        state=reply.state,
        terminal=reply.terminal,
        submitted_at=reply.submitted_at,
        cause=reply.causes[0].text if reply.causes else "",
        subtasks=[SubtaskRows(rows.subtask, rows.begin, rows.end) for rows in reply.subtasks],
        rows_lost=sum(rows.lost for rows in reply.subtasks),
    )


def wait_result(
    access: Access,
    job: str,
    sink: str | None = None,
    timeout: float | None = None,
    *,
    allow_loss: bool = False,
) -> ResultInfo:
    """Wait until a job has ended, and say what there is to read. ``timeout`` in seconds; None: for ever.

    Args:
        allow_loss: also if rows were lost, in the job or with a worker that kept them.

    Raises:
        RowsLost: some were, and that is not allowed.
        TaskFailed: the job failed; the text has its first cause.
        TaskCancelled: it was cancelled.
        TimeoutError: ``timeout`` seconds passed; the job runs on.
        ShuffleError: as :func:`describe_result`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    info = describe_result(access, job, sink)
    while not info.terminal:
        left = LONG_POLL_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"job {info.job} ({info.name}) still runs after {timeout:g} s")
        wait = min(left, LONG_POLL_SECONDS)
        access.request(WaitJob(job=info.job, wait_seconds=wait), away_seconds=AWAY_SECONDS_MAX)
        info = describe_result(access, info.job, info.sink, away_seconds=AWAY_SECONDS_MAX)
    if info.state == "failed":
        raise TaskFailed(f"job {info.job} ({info.name}) failed: {info.cause}")
    if info.state == "canceled":
        raise TaskCancelled(f"job {info.job} ({info.name}) was cancelled")
    if not allow_loss and info.rows_lost:
        raise RowsLost(
            f"{info.rows_lost:,} rows that job {info.job} ({info.name}) kept are lost with their workers: "
            "run the job again, or read what there is with option('allow-loss', True)"
        )
    if not allow_loss and info.state == "finished_with_loss":
        raise RowsLost(
            f"job {info.job} ({info.name}) lost rows: see 'minishuffle jobs show {info.job}'; read what "
            "there is with option('allow-loss', True)"
        )
    return info


def commit_result(access: Access, job: str, sink: str, offsets: Mapping[int, int]) -> None:
    """A batch that ends at these offsets, by subtask, was dealt with.

    The last two batches that were committed can be read again; what is older is given up, and a job that
    does not end goes on if it waited because too much was unread.

    Raises:
        UsageError: an offset is beyond what there is.
        ShuffleError: as :func:`describe_result`.
    """
    message = CommitResult(job=job, sink=sink, offsets=dict(offsets))
    reply = access.request(message, away_seconds=AWAY_SECONDS_MAX)
    if not isinstance(reply, Accepted):
        raise RemoteProtocolError(f"the coordinator answered with {type(reply).__name__}")


# --- reader ---------------------------------------------------------------------------------------

EXCLUSIVE_BUFFERS: Final = 2
WAIT_SECONDS: Final = 1.0
RECONNECTS_MAX: Final = 60
"""Connections in a row that brought nothing."""
RECONNECT_SECONDS: Final = 0.1
_log = logging.getLogger("minishuffle.remote")


class ResultReader:
    """Rows ``rows.start`` to ``rows.stop`` of one subtask of a sink. Use it in a ``with`` statement, or close
    it.

    They may be on several workers, if the subtask restarted. A worker that is lost meanwhile takes its rows
    with it: they are passed over, or the reader fails. Those of a job with a guarantee come again, under
    later numbers.

    Args:
        job, sink, subtask: as :func:`~minishuffle.remote.reader.describe_result` tells them.
        allow_loss: pass rows that are lost over, and say which in ``lost``.

    Raises (from :meth:`batches`):
        UnknownName: there is no such job or sink.
        UsageError: the rows are not there (any more).
        ResourceExhausted: the worker serves too many readers already.
        PeerLost, AuthenticationError: coordinator or worker cannot be reached, or refuses the secret.
    """

    def __init__(
        self, access: Access, job: str, sink: str, subtask: int, rows: range, *, allow_loss: bool = False
    ) -> None:
        self.lost: list[range] = []
        """Rows that nobody has any more."""
        self._access = access
        self._allow_loss = allow_loss
        self._request = OpenResult(job=job, sink=sink, subtask=subtask, begin=rows.start, end=rows.stop)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Take nothing more; may be called again, and from within :meth:`batches`."""
        self._stack.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in order, each time from the first on. A batch stays whole after the end."""
        self.lost.clear()
        at, end = self._request.begin, self._request.end
        tries = 0
        while at < end:
            self.close()
            try:
                opened = self._open(at)
                if not opened.lost:
                    for batch in self._part(opened, at):
                        at, tries = at + batch.num_rows, 0
                        yield batch
                    continue
            except PeerLost:
                tries += 1
                if tries == RECONNECTS_MAX:
                    raise
                time.sleep(RECONNECT_SECONDS)
                continue
            finally:
                self.close()
            if not (opened.comes_again or self._allow_loss):
                raise PeerLost(opened.lost)
            if not opened.comes_again:
                self._pass_over(range(at, opened.end), opened.lost)
            at = opened.end

    def _pass_over(self, rows: range, why: str) -> None:
        self.lost.append(rows)
        name = f"{self._request.sink}[{self._request.subtask}]"
        _log.warning("rows %d to %d of %s are lost: %s", rows.start, rows.stop, name, why)

    def _open(self, begin: int) -> ResultOpened:
        """Where the rows from ``begin`` on are."""
        request = self._request.model_copy(update={"begin": begin})
        reply = self._access.request(request, away_seconds=AWAY_SECONDS_MAX / RECONNECTS_MAX)
        if not isinstance(reply, ResultOpened) or not begin < reply.end <= self._request.end:
            raise RemoteProtocolError(f"the coordinator answered with {type(reply).__name__}")
        return reply

    def _part(self, opened: ResultOpened, begin: int) -> Iterator[pa.RecordBatch]:
        connection = self._stack.enter_context(
            ExternalConnection(
                self._access,
                opened.worker,
                _nothing,
                ticket=opened.ticket,
                term=opened.term,
                segment_bytes=opened.segment_bytes,
            )
        )
        gate = connection.run(lambda: self._gate(connection, opened.job))
        self._stack.callback(connection.run, gate.close)
        yield from self._read(connection, gate, opened.end - begin)

    def _gate(self, connection: ExternalConnection, job: str) -> InputGate:
        """(Loop.) A gate with one channel, which is requested."""
        paths, subtask = connection.paths, self._request.subtask
        pool = connection.pool.create_pool("input", EXCLUSIVE_BUFFERS + 1, connection.pool.total)
        gate = InputGate(
            0,
            0,
            GateBuffers(pool, connection.pool.segment_bytes, EXCLUSIVE_BUFFERS, pool.maximum),
            wake=paths.bell.ring,
            give_back=paths.give_back,
            budget=AssemblyBudget(limits.ASSEMBLY_BYTES_MAX),
            counters=connection.counters,
        )
        request = PartitionRequest(PartitionId(JobId(job), 0, subtask), 0)
        gate.add_channel(subtask).attach_remote(connection.link, request)
        return gate

    def _read(self, connection: ExternalConnection, gate: InputGate, wanted: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        bell, rows = connection.paths.bell, 0
        while not gate.finished:
            bell.clear()
            element = gate.poll()
            if element is None:
                if not gate.finished:
                    bell.wait(WAIT_SECONDS)
                continue
            batch = decode(element.format, element.rows, element.payload).payload
            if not isinstance(batch, pa.RecordBatch):
                raise RemoteProtocolError("kept results are not Arrow columns")
            rows += batch.num_rows
            yield batch
        if rows != wanted:
            raise RemoteProtocolError(f"the worker sent {rows} rows where {wanted} were asked for")


def _nothing(link: DataLink, events: list[ConnectionEvent]) -> None:
    """A worker that serves results asks for nothing."""
