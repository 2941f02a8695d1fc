"""Label values that tell live things apart without ids that grow for ever.

A series is named by what the user named: the job (``pipeline``) and the operator (``vertex``). Ids in
labels would leave a new set of series behind with each submission. Two live jobs may share a name,
though, and the same series twice makes a whole scrape invalid. Adding them up is no way out: when
one ends the sum falls, which Prometheus reads as a counter's restart and turns into a rate that
never was. So the first that is seen has the bare name and a later one ``name (id)``, and each keeps
its label as long as it lives. Series of the second job are then named after its id: only as many
as run at once. Each worker judges by the jobs that it hosts itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from minishuffle.counters import TaskSnapshot

__all__ = ["StableLabels", "TaskLabels"]

Key: TypeAlias = "tuple[str | int, ...]"


class StableLabels:
    """Gives each live key a label that no other live key of its scope has.

    A key is a tuple whose last item is the id; the items before it are the scope.
    """

    def __init__(self) -> None:
        self._labels: dict[Key, str] = {}

    def assign(self, wanted: Mapping[Key, str]) -> Mapping[Key, str]:
        """Labels for the keys that live now, as near to the wanted names as can be.

        Keys that are absent are forgotten and their labels may be given anew; new keys are served
        in the order of ``wanted``.
        """
        kept = {key: label for key, label in self._labels.items() if key in wanted}
        taken = {(*key[:-1], label) for key, label in kept.items()}
        for key, name in wanted.items():
            if key in kept:
                continue
            label = name
            while (*key[:-1], label) in taken:
                label = f"{label} ({key[-1]})"
            kept[key] = label
            taken.add((*key[:-1], label))
        self._labels = kept
        return kept


class TaskLabels:
    """Labels (pipeline, vertex, subtask) of a worker's tasks, the same over restarts."""

    def __init__(self) -> None:
        self._pipelines = StableLabels()
        self._vertices = StableLabels()

    def assign(self, tasks: Iterable[TaskSnapshot]) -> list[tuple[tuple[str, str, str], TaskSnapshot]]:
        """Name the newest attempt of each subtask; an abandoned older one has no series any more."""
        newest: dict[tuple[str, int, int], TaskSnapshot] = {}
        for task in tasks:
            subtask = (task.job, task.operator, task.index)
            if subtask not in newest or newest[subtask].attempt < task.attempt:
                newest[subtask] = task
        ordered = sorted(newest.values(), key=lambda t: (len(t.job), t.job, t.operator, t.index))
        pipelines = self._pipelines.assign({(task.job,): task.job_name for task in ordered})
        vertices = self._vertices.assign({(task.job, task.operator): task.name for task in ordered})
        return [
            ((pipelines[(task.job,)], vertices[(task.job, task.operator)], str(task.index)), task)
            for task in ordered
        ]
