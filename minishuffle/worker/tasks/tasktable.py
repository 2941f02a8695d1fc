"""The attempts that a worker was given, from their deployment to their release. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from minishuffle.errors import PartitionLost
from minishuffle.ids import (
    AttemptId,
    SubtaskId,
    holder_operator,
    is_snapshot_edge,
    snapshot_edge,
    state_edge,
)
from minishuffle.wire.messages import ErrorInfo, HolderSpec, OutputSpec, TaskSpec

__all__ = ["TaskTable", "takes_snapshots"]


@dataclass(slots=True)
class _Entry:
    spec: TaskSpec
    waits: bool
    """It drops nothing if a consumer is not there."""
    terminal: bool = False
    finished: bool = False
    lost: ErrorInfo | None = None
    """Why its stored partition cannot be read, until this is reported to the coordinator."""


def takes_snapshots(spec: TaskSpec, *, is_guaranteed: bool) -> bool:
    """Whether a task takes local snapshots: its job has a guarantee, and no blocking exchange has it run
    again from its beginning."""
    inputs, outputs = (each.guaranteed for each in spec.inputs), (each.retained for each in spec.outputs)
    return is_guaranteed and all(inputs) and all(outputs)


class TaskTable:
    """All attempts of one worker that were not released, and the programs prepared for later attempts.

    Invariants: an attempt that is terminal has no deadline for its cancel; none is older than the newest of
    its subtask.
    """

    def __init__(self) -> None:
        self._entries: dict[AttemptId, _Entry] = {}
        self._newest: dict[SubtaskId, int] = {}
        """The highest attempt of each subtask that was ever deployed here."""
        self._canceling: dict[AttemptId, float] = {}
        """When attempts that were cancelled are abandoned; the earliest first."""
        self._programs: dict[str, dict[int, bytes]] = {}
        """By job and operator: programs that came ahead of need."""
        self.abandoned = self.stuck = 0
        """Attempts abandoned so far, and how many of their threads still run."""

    def add(self, key: AttemptId, spec: TaskSpec, *, waits: bool, is_guaranteed: bool = False) -> bool:
        """An attempt is deployed; False: it, or a later one of its subtask, was before.

        One that takes snapshots has a partition for their holder, beside its outputs.
        """
        if takes_snapshots(spec, is_guaranteed=is_guaranteed):
            stream = _for_the_holder(spec.operator, spec.index)
            spec = spec.model_copy(update={"outputs": [*spec.outputs, stream]})
        if self._newest.get(key.subtask, 0) >= key.attempt:
            return False
        self._newest[key.subtask] = key.attempt
        self._entries[key] = _Entry(spec, waits)
        return True

    def add_holder(self, key: AttemptId, held: HolderSpec) -> TaskSpec | None:
        """A holder of snapshots is deployed, which is an attempt with one partition; None: it was before."""
        spec = TaskSpec(
            operator=key.subtask.operator,
            name=f"holder of {held.operator}",
            index=held.index,
            parallelism=held.index + 1,
            attempt=held.attempt,
            inputs=[],
            outputs=[_state_of(held.operator, held.index)],
        )
        return spec if self.add(key, spec, waits=True) else None

    def held(self) -> list[AttemptId]:
        """Every attempt, in the order of their deployment."""
        return list(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: AttemptId) -> bool:
        return key in self._entries

    def __getitem__(self, key: AttemptId) -> TaskSpec:
        return self._entries[key].spec

    def prepare(self, job: str, programs: dict[int, bytes]) -> None:
        """Attempts of a job may be deployed here without these, which are of its operators."""
        self._programs[job] = programs

    def prepared(self, job: str) -> dict[int, bytes]:
        """The programs of a job that came ahead of need, by operator."""
        return self._programs.get(job, {})

    def prepared_jobs(self) -> list[str]:
        """The jobs whose programs are here ahead of need, in order."""
        return sorted(self._programs)

    def jobs(self) -> list[str]:
        """The jobs of all programs and attempts that ever came here, up to :meth:`forget`, in order."""
        return sorted({*self._programs, *(subtask.job for subtask in self._newest)})

    def runs(self, key: AttemptId) -> bool:
        """Whether it is here and not terminal."""
        entry = self._entries.get(key)
        return entry is not None and not entry.terminal

    def listens(self, key: AttemptId) -> bool:
        """Whether it has finished, and producers may have yet to hear what its last snapshot covers."""
        entry = self._entries.get(key)
        return (
            entry is not None and entry.finished and any(is_snapshot_edge(o.edge) for o in entry.spec.outputs)
        )

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

    def keep_state(self, key: AttemptId) -> list[OutputSpec]:
        """It has ended and keeps its state for the next attempt of its subtask: gives the partition, which is
        released with it."""
        entry = self._entries[key]
        state = _state_of(entry.spec.operator, entry.spec.index)
        entry.spec = entry.spec.model_copy(update={"outputs": [*entry.spec.outputs, state]})
        return [state]

    def abandon(self, key: AttemptId) -> None:
        """Abandon an attempt: it is terminal, although its thread still runs."""
        self.end(key)
        self.abandoned += 1
        self.stuck += 1

    def still_run(self, threads: int) -> None:
        """Set the number of threads of abandoned attempts that still run."""
        self.stuck = threads

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
        self._programs.pop(job, None)
        self._newest = {subtask: n for subtask, n in self._newest.items() if subtask.job != job}

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert all(map(self.runs, self._canceling))
        assert list(self._canceling.values()) == sorted(self._canceling.values())
        assert all(key.attempt <= self._newest[key.subtask] for key in self._entries)


def _for_the_holder(operator: int, index: int) -> OutputSpec:
    """The partition by which the holder of a task's snapshots gets them."""
    return OutputSpec(
        edge=snapshot_edge(operator),
        operator=holder_operator(operator),
        first=index,
        count=1,
        retained=True,
    )


def _state_of(operator: int, index: int) -> OutputSpec:
    """The partition in which the next attempt of a subtask finds its state."""
    return OutputSpec(edge=state_edge(operator), operator=operator, first=index, count=1, kept=True)
