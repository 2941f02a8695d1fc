"""The state of subtasks that move: where it is kept, until the next attempt has read it. Pure.

An attempt that has stopped at the barrier of a move (:mod:`~minishuffle.coordinator.scheduling.moving`)
writes its state down and ends. Its worker keeps the state, and the next attempt reads it from there before
anything else::

    ended, moved --next attempt deployed--> unread --it runs--> read: the worker may forget it
                                              |
                                              +--it runs without: the worker is lost, say--> lost

An attempt that ends before it runs leaves the state unread for the next one. State that was lost counts like
that of an attempt that was lost, and the job has an event of it. (Flink moves state with a savepoint.)
"""

from __future__ import annotations

from collections.abc import Callable

from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.progress import JobProgress
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.scheduling.slots import Slots
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.reports import TaskStateChanged

__all__ = ["MovedState", "go_on_with_state"]

Note = Callable[[Subtask, str, float, str], None]


class MovedState:
    """The state of one job's subtasks that move.

    Args:
        note: adds an event of a subtask, with its kind, time and text.
    """

    def __init__(self, graph: JobGraph, progress: JobProgress, slots: Slots, note: Note) -> None:
        self._progress, self._slots, self._note = progress, slots, note
        self._taken = go_on_with_state(graph)
        self._done: list[tuple[int, TaskKey, int]] = []
        """Worker, subtask and attempt of state that nobody will read, until its worker hears so."""

    def reported(self, task: Subtask, message: TaskStateChanged, at: float) -> None:
        """A worker has reported the state of a subtask's current attempt."""
        if message.state == "running":
            if (held := task.state_held) is not None:
                self._read(task, held, message.state_lost, at)
        elif task.operator not in self._taken:
            return
        elif message.moved:
            task.keep_state(message.state_bytes)
        elif message.state == "failed" and (held := task.state_held) is not None:
            # It has read the state, perhaps: the next attempt must not fail of it again.
            self._read(task, held, "it failed before it ran", at)
        elif message.state_lost:
            text = f"{task} moves without its state: {message.state_lost}"
            self._note(task, "state lost", at, text)

    def _read(self, task: Subtask, held: tuple[int, int], lost: str, at: float) -> None:
        """The current attempt has read what is kept for it; or it is ``lost``, for that reason."""
        worker, attempt = held
        self._done.append((worker, task.key, attempt))
        if lost:
            self._lose(task, held, lost, at)
        else:
            text = f"{task} goes on with the state of attempt {attempt}, from worker {worker}"
            self._note(task, "state moved", at, text)
        task.drop_state()

    def _lose(self, task: Subtask, held: tuple[int, int], why: str, at: float) -> None:
        worker, attempt = held
        text = f"{task} begins without the state of attempt {attempt}, which worker {worker} kept: {why}"
        self._progress.state_lost(task.key, attempt)
        self._note(task, "state lost", at, text)

    def for_next(self, task: Subtask, resumption: Resumption, at: float) -> Resumption:
        """The resumption of a subtask's next attempt, with where its state is."""
        held = task.state_held
        if held is not None and held[0] not in self._slots.workers():
            self._lose(task, held, "that worker is gone", at)
            held = None
        worker, attempt = held or (0, 0)
        return resumption._replace(state_worker=worker, state_attempt=attempt)

    def take_done(self) -> list[tuple[int, TaskKey, int]]:
        """Remove and return the state that its workers need not keep any longer, as worker, subtask and
        attempt."""
        done, self._done = self._done, []
        return done


def go_on_with_state(graph: JobGraph) -> frozenset[int]:
    """The operators that go on with their state. Others get rows once more that are in the state: all of
    them, or those of a stored input. What is read first, and sent again, is no part of the state."""
    kept, replayed = graph.kept_edges(), graph.replayed()
    return frozenset(
        number
        for number in range(len(graph.vertices))
        if number not in replayed
        and all(edge not in kept or graph.is_read_first(edge) for edge in graph.inputs_of(number))
    )
