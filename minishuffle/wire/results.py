"""The control plane of results that other programs read: see ``external.results`` and ``external.reader``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from minishuffle.wire.parts import ControlMessage, ErrorInfo, WorkerAddress

__all__ = [
    "CommitResult",
    "DescribeResult",
    "DropResult",
    "FreeRows",
    "KeptRows",
    "OpenResult",
    "ResultDescribed",
    "ResultExpected",
    "ResultMessage",
    "ResultOpened",
    "ServeResult",
]


class KeptRows(ControlMessage):
    """Rows ``begin`` to ``end`` of a sink's subtask can be read; they are numbered from 0."""

    subtask: int
    begin: int
    end: int


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
    over: bool
    submitted_at: float
    """Seconds since 1970; tells jobs of one id apart, since every coordinator counts from 1."""
    causes: list[ErrorInfo] = Field(default_factory=list)
    """Of a job that failed, first cause first."""
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
    """Dial that worker as client number ``ticket`` and request the partition of that subtask."""

    type: Literal["result_opened"] = "result_opened"
    term: int
    ticket: int
    job: str
    worker: WorkerAddress
    segment_bytes: int
    """Of the worker's network buffers: the reader's must not be shorter."""


class ServeResult(ControlMessage):
    """(To a worker.) A client will come with that ticket for rows ``begin`` to ``end``."""

    type: Literal["serve_result"] = "serve_result"
    term: int
    job: str
    operator: int
    index: int
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
    begin: int
    read: int


class DropResult(ControlMessage):
    """(To a worker.) Give up everything that it keeps of that job."""

    type: Literal["drop_result"] = "drop_result"
    term: int
    job: str


ResultMessage: TypeAlias = (
    DescribeResult
    | ResultDescribed
    | OpenResult
    | ResultOpened
    | ServeResult
    | ResultExpected
    | CommitResult
    | FreeRows
    | DropResult
)
