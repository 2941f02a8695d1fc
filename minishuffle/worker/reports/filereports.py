"""A sink's reports of complete files, or of what it has prepared: made on the task's thread, acknowledged on
the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minishuffle import limits
from minishuffle.operators.base import CompleteFile
from minishuffle.worker.tasks.handoff import TaskPaths

__all__ = ["FileReports"]


class FileReports:
    """The files of one attempt; an :class:`~minishuffle.operators.base.OutputFiles`.

    Args:
        report: called on the loop with a file that the coordinator is to list.
        listed: by earlier attempt, how many files the coordinator has listed.
        committable: what an earlier attempt has prepared last.
    """

    def __init__(
        self,
        paths: TaskPaths,
        report: Callable[[CompleteFile], None],
        listed: Mapping[int, int],
        committable: bytes = b"",
    ) -> None:
        self.listed = listed
        self.committable = committable
        self.acknowledged = 0
        """Written by the loop."""
        self._paths = paths
        self._report = report
        self._reported = 0

    # --- task ------------------------------------------------------------------------------------

    def complete(self, file: CompleteFile) -> None:
        self._reported += 1
        self._paths.post(self._report, file)

    def _all_listed(self) -> bool:
        return self.acknowledged == self._reported

    def wait(self) -> None:
        if not self._all_listed():
            self._paths.wait_until(self._all_listed)

    def linger(self) -> None:
        self._paths.linger(self._all_listed, limits.FILE_LINGER_SECONDS_MAX)

    # --- loop ------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """The coordinator has listed the next file."""
        self.acknowledged += 1
        self._paths.bell.ring()
