"""Control messages about the files of sinks that are listed."""

from __future__ import annotations

from typing import Literal

from minishuffle.wire.messages import ControlMessage, Name

__all__ = ["GetFiles", "JobFiles", "ListedFile"]


class ListedFile(ControlMessage):
    """A file of a sink that is in the manifest."""

    operator: int
    index: int
    attempt: int
    path: str
    rows: int
    bytes: int
    checksum: Name
    named: bool = True
    """False: its worker was lost, and nobody has seen since that it has the name in ``path``. If it does not,
    it is hidden beside: its name begins with a dot and the job's id, and ends with that one."""


class GetFiles(ControlMessage):
    """Files that the sinks of a job have completed, from number ``after`` on: the client has those before
    it."""

    type: Literal["get_files"] = "get_files"
    job: str
    after: int = 0


class JobFiles(ControlMessage):
    """``next`` is the number behind that of the last file."""

    type: Literal["job_files"] = "job_files"
    files: list[ListedFile]
    next: int
