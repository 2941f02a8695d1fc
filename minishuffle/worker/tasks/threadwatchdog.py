"""Tasks that are stuck in the user's code, and the threads of abandoned tasks. A Python thread cannot be
killed; it may end much later."""

from __future__ import annotations

from collections.abc import Callable

from minishuffle.errors import TaskFailed
from minishuffle.ids import AttemptId
from minishuffle.wire.messages import ErrorInfo, TaskSpec

__all__ = ["StuckThreads", "stuck_error"]


def stuck_error(spec: TaskSpec, seconds: float, unread: str) -> ErrorInfo:
    """The error of a task whose user function has not returned for ``seconds``, although it has input to
    read."""
    task = f"{spec.name}[{spec.index}]"
    text = f"{task} is stuck: for {seconds:g} s its function has not returned. It has yet to read {unread}"
    return ErrorInfo(code=TaskFailed.code, text=text, task=task)


class StuckThreads:
    """The threads of abandoned tasks that had not ended when :meth:`slots` was last asked for."""

    def __init__(self) -> None:
        self._threads: dict[AttemptId, tuple[int, Callable[[], bool]]] = {}
        """By attempt, its slot, and a function that returns whether its thread still runs."""

    def __len__(self) -> int:
        return len(self._threads)

    def add(self, attempt: AttemptId, slot: int, is_alive: Callable[[], bool]) -> None:
        self._threads[attempt] = slot, is_alive

    def slots(self) -> dict[str, list[int]]:
        """The slots in which a thread of an abandoned task still runs, by job."""
        self._threads = {key: each for key, each in self._threads.items() if each[1]()}
        found: dict[str, set[int]] = {}
        for key, (slot, _) in self._threads.items():
            found.setdefault(key.subtask.job, set()).add(slot)
        return {job: sorted(slots) for job, slots in found.items()}
