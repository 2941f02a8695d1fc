"""The manifest of a job: the files completed by its sinks. Only listed files are output. Pure.

A file is listed when the current attempt of its subtask reports it, and stays output whatever happens to the
attempt later. Files of an attempt that was fenced before are never listed; the next attempt removes them. An
attempt's files are listed in the order of their numbers, so their count identifies them.

A user's sink that commits in two phases reports what it has prepared in the same way, and commits that once
it is listed. It prepares the next only then, so the last one of a subtask is all that the next attempt may
have to commit again.

In a job that loses nothing an attempt also reports files that an earlier one has written, which were complete
in the snapshot with which it began. They count as that one's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from minishuffle import limits
from minishuffle.coordinator.journal.codec import Record
from minishuffle.wire.outputs import JobFiles, ListedFile
from minishuffle.wire.reports import FileCompleted

__all__ = ["Manifest"]

REPLY_FILES_MAX: Final = 1_000
"""Most files in one reply; the client asks for the next ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRecord(Record):
    """The counts of listed files by subtask and attempt, and the lost attempts with files that may still be
    hidden."""

    files: int
    rows: int
    counts: tuple[tuple[int, int, dict[int, int]], ...]
    lost: tuple[tuple[int, int, int], ...]
    committables: tuple[tuple[int, int, bytes], ...] = ()
    complete: tuple[tuple[int, int], ...] = ()
    """Subtasks whose last file is listed."""
    committed: int = 0


class Manifest:
    """The files of one job: it counts all of them, and can name the last JOB_FILES_KEPT.

    Invariants: ``files`` and ``rows`` are the sums of the counts by attempt, and never fall.
    """

    def __init__(self) -> None:
        self.files = 0
        self.rows = 0
        self.committed = 0
        """Rows of what was prepared to be committed: in no file."""
        self._kept: deque[ListedFile] = deque(maxlen=limits.JOB_FILES_KEPT)
        self._counts: dict[tuple[int, int], dict[int, int]] = {}
        """Counts of listed files, by operator and index of the subtask, and by attempt."""
        self._lost: dict[tuple[int, int], int] = {}
        """By subtask, the attempt that was lost before its files were seen to have their final names."""
        self._committables: dict[tuple[int, int], bytes] = {}
        """By subtask, what it has prepared last."""
        self._complete: set[tuple[int, int]] = set()
        """Subtasks whose last file is listed."""

    def add(self, file: FileCompleted) -> bool:
        """List a file; False, and nothing changes, if it is not the next one of its attempt."""
        operator, index = file.attempt.subtask.key
        counts, attempt = self._counts.setdefault((operator, index), {}), _writer(file)
        if file.file != counts.get(attempt, 0):
            return False
        counts[attempt] = file.file + 1
        if file.is_last:
            self._complete.add((operator, index))
        if file.committable:
            self._committables[operator, index] = file.committable
            self.committed += file.rows
            return True
        self.files += 1
        self.rows += file.rows
        self._kept.append(
            ListedFile(
                operator=operator,
                index=index,
                attempt=attempt,
                path=file.path,
                rows=file.rows,
                bytes=file.bytes,
                checksum=file.checksum,
            )
        )
        return True

    def lost(self, operator: int, index: int, attempt: int) -> None:
        """An attempt was lost: its listed files may still have hidden names."""
        if (operator, index) in self._counts:
            self._lost.setdefault((operator, index), attempt)

    def settled(self, operator: int, index: int) -> None:
        """An attempt runs: it has given the hidden files of earlier attempts their final names."""
        self._lost.pop((operator, index), None)

    def lists(self, file: FileCompleted) -> bool:
        """Whether the file was listed, now or before."""
        return file.file < self._counts.get(file.attempt.subtask.key, {}).get(_writer(file), 0)

    def record(self) -> ManifestRecord:
        """For the journal: the counts, without the files."""
        return ManifestRecord(
            files=self.files,
            rows=self.rows,
            counts=tuple((*key, counts) for key, counts in self._counts.items()),
            lost=tuple((*key, attempt) for key, attempt in self._lost.items()),
            committables=tuple((*key, given) for key, given in self._committables.items()),
            complete=tuple(self._complete),
            committed=self.committed,
        )

    def kept_above(self, number: int) -> list[tuple[int, ListedFile]]:
        """The kept files after the first ``number``, with their numbers from 1."""
        new = max(0, min(self.files - number, len(self._kept)))
        return list(enumerate(islice(self._kept, len(self._kept) - new, None), self.files - new + 1))

    def recall(self, record: ManifestRecord, files: Iterable[ListedFile]) -> None:
        """Restore from the records; ``files`` are in order."""
        self.files, self.rows, self.committed = record.files, record.rows, record.committed
        self._kept.extend(files)
        self._counts = {(operator, index): counts for operator, index, counts in record.counts}
        self._lost = {(operator, index): attempt for operator, index, attempt in record.lost}
        self._committables = {(operator, index): given for operator, index, given in record.committables}
        self._complete = {(operator, index) for operator, index in record.complete}

    def counts(self, operator: int, index: int) -> dict[int, int]:
        """The number of listed files of a subtask, by attempt."""
        return dict(self._counts.get((operator, index), {}))

    def committable(self, operator: int, index: int) -> bytes:
        """The commit that a subtask has prepared last; empty: none."""
        return self._committables.get((operator, index), b"")

    def start_over(self) -> None:
        """All tasks begin again: rows may come that no attempt has had listed."""
        self._complete.clear()

    def is_complete(self, operator: int, index: int) -> bool:
        """Whether the last file of a subtask is listed."""
        return (operator, index) in self._complete

    def _is_named(self, file: ListedFile) -> bool:
        lost = self._lost.get((file.operator, file.index))
        return lost is None or file.attempt < lost

    def after(self, number: int) -> JobFiles:
        """The files from ``number`` on; files that are no longer kept are left out."""
        dropped = self.files - len(self._kept)
        first = min(max(number - dropped, 0), len(self._kept))
        found = [self._kept[at] for at in range(first, min(first + REPLY_FILES_MAX, len(self._kept)))]
        found = [file.model_copy(update={"named": self._is_named(file)}) for file in found]
        return JobFiles(files=found, next=dropped + first + len(found))


def _writer(file: FileCompleted) -> int:
    """The attempt that has written it."""
    return file.writer or file.attempt.attempt
