"""Control messages about the listed files of sinks."""

from __future__ import annotations

from typing import Literal

from minishuffle.wire.messages import ControlMessage, Name

__all__ = ["GetFiles", "JobFiles", "ListedFile"]


class ListedFile(ControlMessage):
    """A file of a sink in the manifest."""

    operator: int
    index: int
    attempt: int
    path: str
    rows: int
    bytes: int
    checksum: Name
    named: bool = True
    """False: its worker was lost, and it is not known whether it has its final name, ``path``. If not, it is
    in the same directory under a hidden name: a dot, the job's id, and at the end its final name."""


class GetFiles(ControlMessage):
    """Files that the sinks of a job have completed, from number ``after`` on: the client has those before
    it."""

    type: Literal["get_files"] = "get_files"
    job: str
    after: int = 0


class JobFiles(ControlMessage):
    """Files of a job; ``next`` is the number after the last file's."""

    type: Literal["job_files"] = "job_files"
    files: list[ListedFile]
    next: int
