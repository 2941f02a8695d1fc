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
    """So many of these rows are lost with the workers that kept them."""


class DescribeResult(ControlMessage):
    """(Client.) ``job`` is an id, or a name: the newest job of it. Answered with ResultDescribed."""

    type: Literal["describe_result"] = "describe_result"
    job: str
    sink: str = ""
    """May be left out if the job has one only."""


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
    """Seconds since 1970; tells jobs of one id apart, since every coordinator counts from 1."""
    causes: list[ErrorInfo] = Field(default_factory=list)
    """Why the job failed, first cause first; empty for any other job."""
    subtasks: list[KeptRows]
    """As far as the coordinator knows, which learns of new rows with each heartbeat."""


class OpenResult(ControlMessage):
    """(Client.) Wants rows ``begin`` to ``end`` of a subtask; answered with ResultOpened."""

    type: Literal["open_result"] = "open_result"
    job: str
    sink: str
    subtask: int
    begin: int
    end: int


class ResultOpened(ControlMessage):
    """Dial that worker as client number ``ticket`` and request the partition of that subtask. It has the rows
    up to ``end``, or they are lost."""

    type: Literal["result_opened"] = "result_opened"
    term: int
    ticket: int
    job: str
    worker: WorkerAddress
    segment_bytes: int
    """Size of the worker's network buffers: the reader's must not be smaller."""
    end: int
    lost: str = ""
    """Why nobody has these rows."""


class ServeResult(ControlMessage):
    """(To a worker.) A client will come with that ticket for rows ``begin`` to ``end``."""

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
    """(Of a worker.) The client may come, or why not."""

    type: Literal["result_expected"] = "result_expected"
    term: int
    ticket: int
    segment_bytes: int = 0
    error: ErrorInfo | None = None


class CommitResult(ControlMessage):
    """(Client.) A batch that ends at these offsets (by subtask) was dealt with. Answered with Accepted."""

    type: Literal["commit_result"] = "commit_result"
    job: str
    sink: str
    offsets: dict[int, int]


class FreeRows(ControlMessage):
    """(To a worker.) Rows below ``begin`` may go; those below ``read`` were dealt with."""

    type: Literal["free_rows"] = "free_rows"
    term: int
    job: str
    operator: int
    index: int
    task_attempt: int
    begin: int
    read: int


class DropResult(ControlMessage):
    """(To a worker.) Give up everything that it keeps of that job."""

    type: Literal["drop_result"] = "drop_result"
    term: int
    job: str


# --- streams --------------------------------------------------------------------------------------

ROWS_FORGOTTEN = -1
"""The rows of a partition that was complete so long ago that nobody knows them."""


def query_and_batch(write: str) -> tuple[str, int]:
    """The parts of ``<query>/<batch>``, as streaming queries name their writes; ("", 0) of any other name."""
    query, _, batch = write.rpartition("/")
    return (query, int(batch)) if query and batch.isascii() and batch.isdigit() else ("", 0)


def partition_split(write: str, partition: int) -> str:
    """The name of the split that a partition of a write is."""
    return f"{write}/{partition}"


def write_and_partition(split: str) -> tuple[str, int]:
    """What :func:`partition_split` was called with."""
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
    """(Client.) One attempt at one partition of a write wants to begin; answered with UpstreamOpened."""

    type: Literal["open_upstream"] = "open_upstream"
    stream: str
    write: str
    partition: int
    partitions: int = 0
    """How many partitions the write has; 0: not known."""
    attempt: int
    schema_message: bytes
    connection: int = 0
    """How often this attempt has lost its connection."""
    sent: OrNone = -1
    """Rows that it has handed to its connections so far, at most; -1: to none, or others may have."""


class UpstreamOpened(ControlMessage):
    """Dial that worker as client number ``ticket``. The first ``rows`` rows are there already."""

    type: Literal["upstream_opened"] = "upstream_opened"
    term: int
    ticket: int
    job: str
    worker: WorkerAddress
    rows: OrNone
    """Or ``ROWS_FORGOTTEN``."""
    checksum: int
    """CRC-32 of the elements that these rows came in, from row ``base`` on."""
    complete: bool
    """All rows are there: nothing is left to do."""
    segment_bytes: int
    """Size of the worker's network buffers: no buffer that is sent may be larger."""
    base: int = 0
    """Rows below are not sent again, whatever became of them: a lease of an earlier attempt of the task ended
    there."""


class BeginWrite(ControlMessage):
    """(To a worker.) A write into that subtask begins. Sent to all subtasks of the stream, also to those that
    none of its partitions come to, before the first partition is let in: see ``UpstreamGate.begin``."""

    type: Literal["begin_write"] = "begin_write"
    term: int
    job: str
    operator: int
    index: int
    task_attempt: int
    ticket: int
    write: str
    partitions: int
    """How many the whole write has; 0: not known."""
    idle: bool = False
    """Its program may be gone: event time does not wait for it until a message with False comes."""
    forgotten: list[Name] = Field(default_factory=list)
    """Writes that have ended, which no message will name any more."""


class WriteBegun(ControlMessage):
    """(Of a worker.) Whatever comes of the write now, its watermark waits for the rest."""

    type: Literal["write_begun"] = "write_begun"
    term: int
    ticket: int


class ExpectUpstream(ControlMessage):
    """(To a worker.) A client will come with that ticket; older attempts of the partition have ended."""

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
    """(Of a worker.) What is there of the partition, or why it cannot be taken."""

    type: Literal["upstream_expected"] = "upstream_expected"
    term: int
    ticket: int
    rows: int = 0
    checksum: int = 0
    complete: bool = False
    segment_bytes: int = 0
    error: ErrorInfo | None = None
    base: int = 0


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
    """(Client.) Nothing more is written, bounded or not. Answered with Accepted."""

    type: Literal["end_stream"] = "end_stream"
    stream: str


class EndWrite(ControlMessage):
    """(To a worker.) The write ends with these partitions of that subtask's; ``last``: so does the stream."""

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
    """(Of a worker.) ``missing``: partitions that are not complete; nothing has ended there then."""

    type: Literal["write_ended"] = "write_ended"
    term: int
    ticket: int
    missing: list[int]
