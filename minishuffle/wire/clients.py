"""Control messages of external clients: records written into a job, results read from one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from minishuffle.wire.messages import ControlMessage, ErrorInfo, Name, OrNone, WorkerAddress

__all__ = [
    "AbortWrite",
    "BeginWrite",
    "CommitResult",
    "CommitWrite",
    "DescribeResult",
    "DescribeStream",
    "DropResult",
    "EndStream",
    "EndWrite",
    "ExpectUpstream",
    "FreeRows",
    "KeptRows",
    "OpenResult",
    "OpenUpstream",
    "ROWS_FORGOTTEN",
    "ResultDescribed",
    "ResultExpected",
    "ResultOpened",
    "ServeResult",
    "StreamInfo",
    "UpstreamExpected",
    "UpstreamOpened",
    "WriteBegun",
    "WriteEnded",
    "partition_split",
    "query_and_batch",
    "write_and_partition",
]


# --- results --------------------------------------------------------------------------------------
#
# The control plane of results that other programs read: see ``external.results`` and ``external.reader``.


class KeptRows(ControlMessage):
    """Rows ``begin`` to ``end`` of a sink's subtask can be read; they are numbered from 0."""

    subtask: int
    begin: int
    end: int
    lost: int = 0
    """Number of these rows lost together with the workers that kept them."""


class DescribeResult(ControlMessage):
    """(Client.) ``job`` is an id, or the name of which the newest job is meant. Answered with
    ResultDescribed."""

    type: Literal["describe_result"] = "describe_result"
    job: str
    sink: str = ""
    """May be left out if the job has only one sink."""


class ResultDescribed(ControlMessage):
    type: Literal["result_described"] = "result_described"
    job: str
    name: str
    sink: str
    schema_message: bytes
    """An Arrow schema as an IPC message."""
    bounded: bool
    state: str
    """As in JobInfo."""
    terminal: bool
    submitted_at: float
    """Seconds since 1970; distinguishes jobs with the same id, since ids start from 1 with a new journal."""
    causes: list[ErrorInfo] = Field(default_factory=list)
    """Why the job failed, first cause first; empty for any other job."""
    subtasks: list[KeptRows]
    """The rows known to the coordinator, which learns of new ones with each heartbeat."""


class OpenResult(ControlMessage):
    """(Client.) Request rows ``begin`` to ``end`` of a subtask; answered with ResultOpened."""

    type: Literal["open_result"] = "open_result"
    job: str
    sink: str
    subtask: int
    begin: int
    end: int


class ResultOpened(ControlMessage):
    """Dial this worker as client number ``ticket``, and request the partition of the subtask. The worker has
    the rows up to ``end``, unless they are ``lost``."""

    type: Literal["result_opened"] = "result_opened"
    term: int
    ticket: int
    job: str
    worker: WorkerAddress
    segment_bytes: int
    """Size of the worker's network buffers: the reader's must not be smaller."""
    end: int
    lost: str = ""
    """Why these rows are lost; empty: they are not."""
    comes_again: bool = False
    """Lost rows are made again, and have later numbers."""


class ServeResult(ControlMessage):
    """(To a worker.) A client with this ticket will read rows ``begin`` to ``end``."""

    type: Literal["serve_result"] = "serve_result"
    term: int
    job: str
    operator: int
    index: int
    task_attempt: int
    ticket: int
    begin: int
    end: int


class ResultExpected(ControlMessage):
    """(From a worker.) The client is expected, or the error."""

    type: Literal["result_expected"] = "result_expected"
    term: int
    ticket: int
    segment_bytes: int = 0
    error: ErrorInfo | None = None


class CommitResult(ControlMessage):
    """(Client.) A batch that ends at these offsets (by subtask) was processed. Answered with Accepted."""

    type: Literal["commit_result"] = "commit_result"
    job: str
    sink: str
    offsets: dict[int, int]


class FreeRows(ControlMessage):
    """(To a worker.) Rows below ``begin`` may be deleted; rows below ``read`` were processed."""

    type: Literal["free_rows"] = "free_rows"
    term: int
    job: str
    operator: int
    index: int
    task_attempt: int
    begin: int
    read: int


class DropResult(ControlMessage):
    """(To a worker.) Delete all kept results of this job."""

    type: Literal["drop_result"] = "drop_result"
    term: int
    job: str


# --- streams --------------------------------------------------------------------------------------

ROWS_FORGOTTEN = -1
"""The row count of a partition that was completed so long ago that it is no longer known."""


def query_and_batch(write: str) -> tuple[str, int]:
    """The parts of ``<query>/<batch>``, as streaming queries name their writes; ("", 0) of any other name."""
    query, _, batch = write.rpartition("/")
    return (query, int(batch)) if query and batch.isascii() and batch.isdigit() else ("", 0)


def partition_split(write: str, partition: int) -> str:
    """The name of the split that a partition of a write is."""
    return f"{write}/{partition}"


def write_and_partition(split: str) -> tuple[str, int]:
    """The arguments of :func:`partition_split`."""
    write, _, partition = split.rpartition("/")
    return write, int(partition)


class DescribeStream(ControlMessage):
    """(Client.) Answered with :class:`StreamInfo`."""

    type: Literal["describe_stream"] = "describe_stream"
    stream: str


class StreamInfo(ControlMessage):
    type: Literal["stream_info"] = "stream_info"
    stream: str
    job: str
    bounded: bool
    schema_message: bytes
    """An Arrow schema as an IPC message."""


class OpenUpstream(ControlMessage):
    """(Client.) Begin an attempt to write a partition; answered with UpstreamOpened."""

    type: Literal["open_upstream"] = "open_upstream"
    stream: str
    write: str
    partition: int
    partitions: int = 0
    """Number of partitions of the write; 0: not known."""
    attempt: int
    schema_message: bytes
    connection: int = 0
    """How often this attempt has lost its connection."""
    sent: OrNone = -1
    """Upper bound of the rows it has passed to its connections so far; -1: none, or other attempts may
    have."""


class UpstreamOpened(ControlMessage):
    """Dial this worker as client number ``ticket``. It already has the first ``rows`` rows."""

    type: Literal["upstream_opened"] = "upstream_opened"
    term: int
    ticket: int
    job: str
    worker: WorkerAddress
    rows: OrNone
    """Or ``ROWS_FORGOTTEN``."""
    checksum: int
    """CRC-32 of the elements with these rows, from row ``base`` on."""
    complete: bool
    """The worker has all rows: nothing is left to do."""
    segment_bytes: int
    """Size of the worker's network buffers: buffers sent to it must not be larger."""
    base: int = 0
    """Rows below are not sent again, even if they were lost: see ``WritePosition``."""
    stable: OrNone = -1
    """Rows below are never asked for again. The writer keeps all behind them until it hears that they are
    stable, too (``Stable``); -1: it hears of none, and keeps as much as can be on the way."""


class BeginWrite(ControlMessage):
    """(To a worker.) A write into this subtask begins. It is sent to all subtasks of the stream, even those
    without a partition of the write, before the first partition is accepted: see ``UpstreamGate.begin``."""

    type: Literal["begin_write"] = "begin_write"
    term: int
    job: str
    operator: int
    index: int
    task_attempt: int
    ticket: int
    write: str
    partitions: int
    """Number of partitions of the whole write; 0: not known."""
    idle: bool = False
    """Its program may be gone: event time does not wait for it until a message with False comes."""
    forgotten: list[Name] = Field(default_factory=list)
    """Writes that have ended, which no message will name any more."""
    known: list[Name] = Field(default_factory=list)
    """(To an attempt that begins.) All writes that messages will name; empty: nothing is said of others."""
    opened: list[int] = Field(default_factory=list)
    """(To an attempt that begins.) Partitions of this subtask that were let in before: the end of the stream
    waits for them."""


class WriteBegun(ControlMessage):
    """(From a worker.) The watermark of the subtask now waits for the write."""

    type: Literal["write_begun"] = "write_begun"
    term: int
    ticket: int


class ExpectUpstream(ControlMessage):
    """(To a worker.) A client with this ticket will write a partition; its older attempts have ended."""

    type: Literal["expect_upstream"] = "expect_upstream"
    term: int
    job: str
    operator: int
    index: int
    task_attempt: int
    ticket: int
    write: str
    partition: int
    attempt: int
    connection: int = 0
    sent: OrNone = -1
    """As in OpenUpstream."""


class UpstreamExpected(ControlMessage):
    """(From a worker.) The rows of the partition that the worker has, or the error."""

    type: Literal["upstream_expected"] = "upstream_expected"
    term: int
    ticket: int
    rows: int = 0
    checksum: int = 0
    complete: bool = False
    segment_bytes: int = 0
    error: ErrorInfo | None = None
    base: int = 0
    stable: OrNone = -1
    """As in UpstreamOpened."""


class CommitWrite(ControlMessage):
    """(Client.) All partitions of a write were written; ends a bounded stream. Answered with Accepted."""

    type: Literal["commit_write"] = "commit_write"
    stream: str
    write: str
    partitions: list[int]


class AbortWrite(ControlMessage):
    """(Client.) The write is given up; a bounded stream's job fails. Answered with Accepted."""

    type: Literal["abort_write"] = "abort_write"
    stream: str
    write: str
    reason: str


class EndStream(ControlMessage):
    """(Client.) End a stream, bounded or not: there are no more writes. Answered with Accepted."""

    type: Literal["end_stream"] = "end_stream"
    stream: str


class EndWrite(ControlMessage):
    """(To a worker.) The write ends; ``partitions`` are those of this subtask. ``last``: the stream ends
    too."""

    type: Literal["end_write"] = "end_write"
    term: int
    job: str
    operator: int
    index: int
    task_attempt: int
    ticket: int
    write: str
    partitions: list[int]
    last: bool


class WriteEnded(ControlMessage):
    """(From a worker.) ``missing``: partitions that are not complete; if there are any, the write has not
    ended there."""

    type: Literal["write_ended"] = "write_ended"
    term: int
    ticket: int
    missing: list[int]
