"""The control plane of records that other programs write into a job: see ``external.writer``."""

from __future__ import annotations

from typing import Literal

from minishuffle.wire.parts import ControlMessage, ErrorInfo, WorkerAddress

__all__ = [
    "ROWS_FORGOTTEN",
    "AbortWrite",
    "CommitWrite",
    "DescribeStream",
    "EndStream",
    "EndWrite",
    "ExpectUpstream",
    "OpenUpstream",
    "StreamInfo",
    "UpstreamExpected",
    "UpstreamOpened",
    "WriteEnded",
]

ROWS_FORGOTTEN = -1
"""The rows of a partition that was complete so long ago that nobody knows them."""


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


class UpstreamOpened(ControlMessage):
    """Dial that worker as client number ``ticket``. The first ``rows`` rows are there already."""

    type: Literal["upstream_opened"] = "upstream_opened"
    term: int
    ticket: int
    job: str
    worker: WorkerAddress
    rows: int
    """Or ``ROWS_FORGOTTEN``."""
    checksum: int
    """CRC-32 of the elements that these rows came in."""
    complete: bool
    """All rows are there: nothing is left to do."""
    segment_bytes: int
    """Of the worker's network buffers: none that is sent may be longer."""


class ExpectUpstream(ControlMessage):
    """(To a worker.) A client will come with that ticket; older attempts of the partition are over."""

    type: Literal["expect_upstream"] = "expect_upstream"
    term: int
    job: str
    operator: int
    index: int
    ticket: int
    write: str
    partition: int
    partitions: int
    attempt: int


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
    """(To a worker.) The write is over for that subtask; ``last``: so is the stream."""

    type: Literal["end_write"] = "end_write"
    term: int
    job: str
    operator: int
    index: int
    ticket: int
    write: str
    partitions: list[int]
    last: bool


class WriteEnded(ControlMessage):
    """(Of a worker.) ``missing``: partitions that are not complete; nothing has ended then."""

    type: Literal["write_ended"] = "write_ended"
    term: int
    ticket: int
    missing: list[int]
