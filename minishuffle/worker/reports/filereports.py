"""A sink's reports of complete files, or of what it has prepared: made on the task's thread, acknowledged on
the loop.

In a job that loses nothing they are held: see :class:`~minishuffle.operators.base.OutputFiles`. Each snapshot
has the files that are complete and, as far as is known, not listed. They are reported once no attempt can
begin at an earlier one; an attempt that begins with the snapshot reports them again, which changes nothing
if they are listed. So the rows of each file are written again by no attempt, or none of them is listed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace

import msgpack

from minishuffle import limits
from minishuffle.operators.base import CompleteFile
from minishuffle.worker.tasks.handoff import TaskPaths

__all__ = ["FileReports"]


class FileReports:
    """The files of one attempt; an :class:`~minishuffle.operators.base.OutputFiles`.

    Invariants: acknowledged ≤ reported ≤ complete; a file is reported only if a snapshot that is safe has it,
    or nothing is held, or the sink waits for that.

    Args:
        report: called on the loop with a file that the coordinator is to list.
        listed: by earlier attempt, how many files the coordinator has listed.
        committable: what an earlier attempt has prepared last.
        attempt: the number of this one.
        held: snapshots are taken of the task, and files are held until they are safe.
        is_complete: an earlier attempt has had the last rows listed.
        rows: that earlier attempts have had listed.
    """

    def __init__(
        self,
        paths: TaskPaths,
        report: Callable[[CompleteFile], None],
        listed: Mapping[int, int],
        committable: bytes = b"",
        *,
        attempt: int = 0,
        held: bool = False,
        is_complete: bool = False,
        rows: int = 0,
    ) -> None:
        self.listed = listed
        """(Written by the loop.) Grows by those that were adopted."""
        self.committable = committable
        self.held, self.is_complete = held, is_complete
        self.adopted: Sequence[CompleteFile] = ()
        self.sink_state = b""
        self.acknowledged = 0
        """Written by the loop."""
        self._secure: Callable[[], None] = lambda: None
        self.rows_again = 0
        """Rows of listed files behind the snapshot with which the attempt begins: they come twice."""
        self._rows = rows
        """In all files that are complete, listed or not; those of earlier attempts included."""
        self._paths = paths
        self._report = report
        self._attempt = attempt
        self._complete = self._in_snapshot = 0
        self._reported = 0
        """Written by the loop."""
        self._unlisted: deque[CompleteFile] = deque()
        """Complete and not acknowledged; the task adds, the loop removes."""
        self._covered: dict[int, int] = {}
        """By number of a snapshot that is not safe, how many files were complete; the task adds, the loop
        removes."""

    # --- task ------------------------------------------------------------------------------------

    def complete(self, file: CompleteFile) -> None:
        self._complete += 1
        self._rows += file.rows
        self._unlisted.append(file)
        if not self.held:
            self._paths.post(self._report_first, self._complete, False)

    def keep(self, state: bytes) -> None:
        self.sink_state = state

    def _all_listed(self) -> bool:
        return self.acknowledged == self._complete and not self._awaited()

    def _awaited(self) -> list[CompleteFile]:
        """The files that were adopted and are not listed."""
        return [file for file in self.adopted if file.number >= self.listed.get(file.attempt, 0)]

    def secure_by(self, secure: Callable[[], None]) -> None:
        """``secure`` has a snapshot safe that is taken when it is called, if that can be."""
        self._secure = secure

    def wait(self) -> None:
        if not self._all_listed():
            self._secure()
        self._report_all(is_last=False)

    def finish(self) -> None:
        self._report_all(is_last=self.held)

    def _report_all(self, *, is_last: bool) -> None:
        if not self._all_listed():
            self._paths.post(self._report_first, self._complete, is_last)
            self._paths.wait_until(self._all_listed)

    def linger(self) -> None:
        """Files that are held are left to the next attempt."""
        self._paths.linger(self._none_reported, limits.FILE_LINGER_SECONDS_MAX)

    @property
    def may_be_listed(self) -> int:
        return self._reported if self.held and self._paths.job_ends else self._complete

    def _none_reported(self) -> bool:
        return self.acknowledged == (self._reported if self.held else self._complete)

    def snapshot(self, number: int) -> bytes:
        """Take the sink's part of the snapshot of that number, which is taken now."""
        self._covered[number] = self._in_snapshot = self._complete
        own = (replace(file, attempt=self._attempt) for file in tuple(self._unlisted))  # copied in one step
        files = [*self._awaited(), *own]
        if not (files or self.sink_state or self._rows):
            return b""
        packed: bytes = msgpack.packb([[astuple(file) for file in files], self.sink_state, self._rows])
        return packed

    @property
    def is_ahead(self) -> bool:
        """Whether a file is complete that no snapshot has."""
        return self._complete > self._in_snapshot

    def restore(self, pending: bytes, *, is_end: bool = False) -> None:
        """(Before the sink is opened.) Go on with what the snapshot has with which the attempt begins. Behind
        all that the task reads (``is_end``) only rows come again that are listed."""
        self.is_complete = self.is_complete and is_end
        files, self.sink_state, covered = msgpack.unpackb(pending) if pending else ([], b"", 0)
        self.rows_again = 0 if self.is_complete else max(0, self._rows - covered)
        self._rows = max(self._rows, covered)
        self.adopted = [CompleteFile(*file) for file in files]
        for file in self._awaited():
            self._paths.post(self._report, file)

    # --- loop ------------------------------------------------------------------------------------

    def safe(self, number: int) -> None:
        """No attempt begins before the snapshot of that number."""
        covered = [each for each in tuple(self._covered) if each <= number]
        if covered:
            self._report_first(max(self._covered.pop(each) for each in covered), False)

    def _report_first(self, count: int, is_last: bool) -> None:
        """Report those of the first ``count`` that were not; the last of them is the subtask's last. A sink
        whose job ends removes what is held."""
        if self.held and self._paths.job_ends:
            return
        for file in [each for each in self._unlisted if self._reported <= each.number < count]:
            self._reported += 1
            self._report(replace(file, is_last=True) if is_last and self._reported == count else file)

    def acknowledge(self, attempt: int = 0) -> None:
        """The coordinator has listed the next file of this attempt, or of the one of which it was adopted."""
        if attempt:
            self.listed = {**self.listed, attempt: self.listed.get(attempt, 0) + 1}
        else:
            self.acknowledged += 1
            self._unlisted.popleft()
        self._paths.bell.ring()
