"""Threads of abandoned tasks: a Python thread cannot be killed, and may come to its end much later."""

from __future__ import annotations

from collections.abc import Callable

from minishuffle.ids import AttemptId

__all__ = ["StuckThreads"]


class StuckThreads:
    """The threads of abandoned tasks that had not ended when :meth:`slots` was last asked for."""

    def __init__(self) -> None:
        self._threads: dict[AttemptId, Callable[[], bool]] = {}
        """Whether each still runs."""

    def __len__(self) -> int:
        return len(self._threads)

    def add(self, attempt: AttemptId, is_alive: Callable[[], bool]) -> None:
        self._threads[attempt] = is_alive

    def slots(self) -> dict[str, list[int]]:
        """By job: the slots in which such a thread still runs."""
        self._threads = {key: is_alive for key, is_alive in self._threads.items() if is_alive()}
        found: dict[str, set[int]] = {}
        for key in self._threads:
            found.setdefault(key.subtask.job, set()).add(key.subtask.index)
        return {job: sorted(slots) for job, slots in found.items()}
