"""The attempts that a worker was given, from their deployment to their release. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from minishuffle.errors import PartitionLost
from minishuffle.ids import AttemptId, SubtaskId
from minishuffle.wire.messages import ErrorInfo, TaskSpec

__all__ = ["TaskTable"]


@dataclass(slots=True)
class _Entry:
    spec: TaskSpec
    waits: bool
    """It drops nothing if a consumer is not there."""
    terminal: bool = False
    finished: bool = False
    lost: ErrorInfo | None = None
    """Why its stored partition cannot be read, until this is reported to the coordinator."""


class TaskTable:
    """All attempts of one worker that were not released.

    Invariants: an attempt that is terminal has no deadline for its cancel; none is older than the newest of
    its subtask.
    """

    def __init__(self) -> None:
        self._entries: dict[AttemptId, _Entry] = {}
        self._newest: dict[SubtaskId, int] = {}
        """The highest attempt of each subtask that was ever deployed here."""
        self._canceling: dict[AttemptId, float] = {}
        """When attempts that were cancelled are abandoned; the earliest first."""

    def add(self, key: AttemptId, spec: TaskSpec, *, waits: bool) -> bool:
        """An attempt is deployed; False: it, or a later one of its subtask, was before."""
        if self._newest.get(key.subtask, 0) >= key.attempt:
            return False
        self._newest[key.subtask] = key.attempt
        self._entries[key] = _Entry(spec, waits)
        return True

    def held(self) -> list[AttemptId]:
        """Every attempt, in the order of their deployment."""
        return list(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: AttemptId) -> bool:
        return key in self._entries

    def __getitem__(self, key: AttemptId) -> TaskSpec:
        return self._entries[key].spec

    def jobs(self) -> set[str]:
        """The jobs of all attempts that were ever deployed here, up to :meth:`forget`."""
        return {subtask.job for subtask in self._newest}

    def runs(self, key: AttemptId) -> bool:
        """Whether it is here and not terminal."""
        entry = self._entries.get(key)
        return entry is not None and not entry.terminal

    def all_wait(self) -> bool:
        """Whether each that runs drops nothing if a consumer is not there."""
        return all(entry.waits or entry.terminal for entry in self._entries.values())

    # --- the end of an attempt -------------------------------------------------------------------

    def cancel(self, key: AttemptId, by: float) -> bool:
        """It is to end by then; False: it was to before, or is terminal."""
        if not self.runs(key) or key in self._canceling:
            return False
        self._canceling[key] = by
        return True

    def overdue(self, now: float) -> list[AttemptId]:
        """Attempts that still run although they were cancelled long ago."""
        return [key for key, by in self._canceling.items() if now >= by]

    def next_deadline(self) -> float | None:
        """When :meth:`overdue` has something."""
        return next(iter(self._canceling.values()), None)

    def end(self, key: AttemptId, *, finished: bool = False) -> None:
        """It is terminal."""
        entry = self._entries[key]
        entry.terminal, entry.finished = True, entry.finished or finished
        self._canceling.pop(key, None)

    def lose(self, key: AttemptId, error: PartitionLost) -> None:
        """The stored partition of an attempt cannot be read."""
        entry = self._entries[key]
        entry.lost = ErrorInfo(code=error.code, text=str(error), task=entry.spec.name)

    def take_lost(self, key: AttemptId) -> ErrorInfo | None:
        """Why what a finished attempt stored cannot be read, once."""
        entry = self._entries[key]
        if not entry.finished:
            return None
        error, entry.lost = entry.lost, None
        return error

    def remove(self, key: AttemptId) -> TaskSpec:
        """It is released, and was ended before."""
        return self._entries.pop(key).spec

    def forget(self, job: str) -> None:
        """The job has ended everywhere."""
        self._newest = {subtask: n for subtask, n in self._newest.items() if subtask.job != job}

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert all(map(self.runs, self._canceling))
        assert list(self._canceling.values()) == sorted(self._canceling.values())
        assert all(key.attempt <= self._newest[key.subtask] for key in self._entries)
