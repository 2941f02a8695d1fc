"""The stages of one job on the schedule ``stages``: the ones due, and the slots that the job holds for them.
Pure.

A stage (see :mod:`~minishuffle.plan.stages`) waits, is deployed as a whole, and is complete when all its
tasks have finished; its stored partitions remain then, and it holds no slots. It runs again, with the next
version, if partitions are lost that other stages still have to read::

    waiting --deployed--> deployed --all tasks have finished--> complete
                             ^                                     |
                             +------------partitions lost----------+

**When.** With ``all`` a stage is deployed when all of its blocking inputs are complete. With ``any`` it may
be deployed *early*, when one of them is: it then holds its slots while it waits for the others. To avoid that
two stages wait for each other, it is deployed early only if there are also slots for each stage that it waits
for, directly or not, one after the other. The job holds these slots until the inputs are complete. If there
are too few, the stage waits as with ``all``. Inputs that are read first must be complete in either case.

**Where.** Subtask i of any vertex runs in slot i of its group, so stages that run at the same time share
slots. In each group, a job holds as many slots as its widest running stage needs, and a stage that runs again
uses the slots of its consumers. No stage waits for slots of its own job.

**In which order.** In the order of the stages. A stage that may be deployed but finds too few slots takes
none. It also holds back all later stages that need more slots than the job holds, so that small stages do not
overtake it forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from minishuffle.coordinator.jobs.lifecycle import WAITING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.plan.graph import JobGraph
from minishuffle.plan.stages import Stage, is_staged, stages_of
from minishuffle.wire.requests import StageInfo

__all__ = ["DueStage", "StageProgress", "stage_slots"]

_StageState = Literal["waiting", "deployed", "complete"]
FIRST_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class DueStage:
    """A stage to deploy, if the job has these slots or can get them."""

    stage: int
    slots: frozenset[int]
    early: bool = False
    """It still waits for inputs, and some of the slots are for their stages."""


StagesRecord: TypeAlias = tuple[tuple[str, int], ...]


class StageProgress:
    """The state of each stage of a job, by its index in the order. A job deployed at once has no stages.

    Invariant: in a stage either all tasks wait or none does.
    """

    def __init__(self, graph: JobGraph) -> None:
        self.order = stages_of(graph) if is_staged(graph) else ()
        self.changed = False
        """A stage or a vertex has changed its state since the last :meth:`take_idle`."""
        self._graph = graph
        self._of = {vertex: number for number, stage in enumerate(self.order) for vertex in stage.vertices}
        self._slots = stage_slots(graph) if self.order else []
        self._versions = [FIRST_VERSION] * len(self.order)
        widths = {vertex: graph.vertices[vertex].parallelism for vertex in self._of}
        self._waiting = Counter(widths)
        """Waiting subtasks by vertex."""
        self._unfinished = Counter(widths)
        """Unfinished subtasks by vertex."""
        self._short: dict[int, str] = {}
        """Why due stages were not deployed at the last try, by stage."""

    # --- what happens ---------------------------------------------------------------------------

    def moved(self, key: TaskKey, before: str, after: str) -> bool:
        """Note that a subtask has changed its state. Returns whether its stage, which was complete, runs
        again."""
        vertex = key[0]
        if vertex not in self._of:
            return False
        stage = self._of[vertex]
        was, was_complete = self.state(stage), not self._unfinished[vertex]
        self._waiting[vertex] -= before == WAITING
        self._unfinished[vertex] += (before == "finished") - (after == "finished")
        self.changed |= (was, was_complete) != (self.state(stage), not self._unfinished[vertex])
        again = was == "complete" and self.state(stage) != "complete"
        self._versions[stage] += again
        return again

    def lacks_slots(self, stage: int, why: str) -> bool:
        """Note why a due stage is not deployed; True if the reason is new."""
        is_new = self._short.get(stage) != why
        self._short[stage] = why
        return is_new

    def starts(self, stage: int) -> None:
        """A stage has its slots, and is about to be deployed."""
        self._short.pop(stage, None)

    def give_up(self) -> None:
        """No stage is deployed any more."""
        self._short.clear()

    # --- where they are -------------------------------------------------------------------------

    def state(self, stage: int) -> _StageState:
        vertices = self.order[stage].vertices
        if any(self._waiting[vertex] for vertex in vertices):
            return "waiting"
        return "deployed" if any(self._unfinished[vertex] for vertex in vertices) else "complete"

    def version(self, stage: int) -> int:
        """The version of a stage: its number of runs, one about to begin included. Its stored partitions have
        this version."""
        return self._versions[stage]

    def stage_of(self, vertex: int) -> int:
        return self._of[vertex]

    def partitions(self, edge: int) -> tuple[int, int]:
        """The numbers of complete and of all partitions of a blocking edge."""
        source = self._graph.edges[edge].source
        count = self._graph.vertices[source].parallelism
        return count - self._unfinished[source], count

    def inputs_left(self, stage: int) -> list[int]:
        """The blocking inputs of a stage that are not complete."""
        return [edge for edge in self.order[stage].inputs if self._unfinished[self._graph.edges[edge].source]]

    def slots(self, stages: Iterable[int]) -> frozenset[int]:
        """The slots of these stages."""
        return frozenset[int]().union(*(self._slots[stage] for stage in stages))

    @property
    def some_lack_slots(self) -> bool:
        """Whether a stage waits only for slots."""
        return bool(self._short)

    def name(self, stage: int) -> str:
        """The stage's name with its number."""
        names = "; ".join(self._graph.vertices[vertex].name for vertex in self.order[stage].vertices)
        return f"stage {stage + 1} of {len(self.order)} ({names})"

    def why_waiting(self, stage: int, *, is_paused: bool) -> str:
        """Why a stage is not deployed, in words."""
        why = []
        for edge in self.inputs_left(stage):
            complete, count = self.partitions(edge)
            why.append(f"{self._graph.exchange_name(edge)} ({complete} of {count} partitions are complete)")
        if not why and is_paused:
            why = ["the end of the pause"]
        elif not why:
            why = [self._short.get(stage, "slots, behind stages before it")]
        return f"{self.name(stage)} waits for {', '.join(why)}"

    def infos(self) -> list[StageInfo]:
        """The stages for clients."""
        return [
            StageInfo(operators=list(stage.vertices), state=self.state(number), version=self.version(number))
            for number, stage in enumerate(self.order)
        ]

    # --- what follows ---------------------------------------------------------------------------

    def due(self) -> list[DueStage]:
        """The due stages with the slots they need, in their order."""
        found = []
        for number, stage in enumerate(self.order):
            if self.state(number) != "waiting":
                continue
            left = self.inputs_left(number)
            if not left:
                found.append(DueStage(number, self.slots([number])))
            elif self._may_go_early(stage, left):
                found.append(DueStage(number, self._with_awaited(number), early=True))
        return found

    def _may_go_early(self, stage: Stage, left: Sequence[int]) -> bool:
        """Whether a stage may be deployed before the inputs ``left`` are complete."""
        some = self._graph.settings.starts_when == "any" and len(left) < len(stage.inputs)
        return some and not any(map(self._graph.is_read_first, left))

    def take_idle(self, held: Iterable[int]) -> list[int]:
        """The held slots that no deployed stage needs; clears :attr:`changed`."""
        self.changed = False
        wanted = self.slots_wanted()
        return [slot for slot in held if slot not in wanted]

    def slots_wanted(self) -> set[int]:
        """The slots of deployed stages, and of the stages they wait for."""
        return set[int]().union(*map(self._with_awaited, self._deployed()))

    def slots_kept(self) -> frozenset[int]:
        """The slots of waiting stages for which deployed stages wait."""
        awaited = set[int]().union(*map(self._awaited, self._deployed()))
        return self.slots(stage for stage in awaited if self.state(stage) == "waiting")

    def _deployed(self) -> list[int]:
        return [number for number in range(len(self.order)) if self.state(number) == "deployed"]

    def _with_awaited(self, stage: int) -> frozenset[int]:
        return self.slots(self._awaited(stage))

    def _awaited(self, stage: int) -> set[int]:
        """A stage and all stages that must be complete before it can end, directly or not."""
        found, fresh = {stage}, [stage]
        while fresh:
            edges = self.inputs_left(fresh.pop())
            more = {self._of[self._graph.edges[edge].source] for edge in edges} - found
            found |= more
            fresh += more
        return found

    # --- the journal ----------------------------------------------------------------------------

    def record(self) -> StagesRecord:
        """For the journal: the state and version of each stage."""
        return tuple((self.state(number), version) for number, version in enumerate(self._versions))

    def recall(self, record: StagesRecord, tasks: Mapping[TaskKey, Subtask]) -> None:
        """Restore from the record and the restored tasks."""
        self._versions = [version for _, version in record] or self._versions
        self._waiting, self._unfinished = Counter(), Counter()
        for (vertex, _), task in tasks.items():
            self._waiting[vertex] += task.state == WAITING
            self._unfinished[vertex] += task.state != "finished"

    def validate(self) -> None:
        """Check the invariant; for tests."""
        for number, stage in enumerate(self.order):
            waiting = sum(self._waiting[vertex] for vertex in stage.vertices)
            width = sum(self._graph.vertices[vertex].parallelism for vertex in stage.vertices)
            assert waiting in (0, width), f"stage {number} is half deployed"
        assert all(self.state(stage) == "waiting" for stage in self._short)


def stage_slots(graph: JobGraph) -> list[frozenset[int]]:
    """By stage of a job, the slots in which its subtasks run."""
    firsts = graph.first_slots()
    return [
        frozenset(
            firsts[vertex] + index
            for vertex in stage.vertices
            for index in range(graph.vertices[vertex].parallelism)
        )
        for stage in stages_of(graph)
    ]
