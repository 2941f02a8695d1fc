"""The tasks to rerun together with a failed subtask of a replayed region, or with a lost stored partition.
Pure.

A *replayed* region (:meth:`JobGraph.replayed`) can be read again from its beginning: its sources are bounded
and not written by external clients, and its other inputs are stored. So no row is lost when a subtask of it
fails. The subtask runs again, and together with it:

- its producers over pipelined edges, back to sources and to stored partitions. A stored partition that is
  lost is made again by its producer;
- its consumers over pipelined edges that have not finished, since they have read part of the previous
  attempt's rows;
- the whole region, unless the plan guarantees that the same rows go to the same consumers in each run.
  Otherwise rows of other members would not match the new division of the rows.

Finished members with available partitions do not run again. They get only the end of the channels from
members that run again (:class:`~minishuffle.coordinator.jobs.consumption.Ends`: these channels are read). A
pipelined channel whose link breaks may lack rows, so its consumer fails (``InputSpec.strict``) and runs again
as well.

A consumer of a stored partition reads all of it before it emits a row, and keeps the rows, so it never mixes
two attempts of a producer. If the producer's rows are the same in each run, the consumer continues with the
rows it has. If not, it restarts together with its own region, even if it has finished, and rows it has
published count as repeated. It restarts even if it has emitted nothing so far, since the coordinator cannot
know that in time.

Tasks that wait for their first deployment have read nothing, and never run again: they will read the new
partitions.

Rows written by external clients cannot be read again. A job that stores them with a blocking edge fails if
it loses them. (Flink restarts the region and everything downstream of it, finished or not,
``RestartPipelinedRegionFailoverStrategy``, since it cannot ask the plan.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from minishuffle.coordinator.jobs.failover import pipelined_regions
from minishuffle.coordinator.jobs.lifecycle import WAITING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.plan.graph import JobGraph

__all__ = ["Rerun", "Replays"]


@dataclass(slots=True)
class Rerun:
    """The tasks that run again together."""

    tasks: set[TaskKey] = field(default_factory=set)
    """Tasks whose next attempt is deployed once the current one has ended."""
    unreadable: set[TaskKey] = field(default_factory=set)
    """The tasks among them that cannot run again: the job fails."""


ReplaysRecord: TypeAlias = tuple[tuple[TaskKey, ...], tuple[TaskKey, ...]]
"""The tasks to deploy together, and the ones among them whose attempt has not ended yet."""


class Replays:
    """The subtasks of one job that run again together.

    All tasks to rerun form a single set, whatever the cause. None of them is deployed while an attempt of any
    of them runs.
    """

    def __init__(self, graph: JobGraph) -> None:
        self.vertices = graph.replayed()
        self.graph = graph
        self._kept = graph.kept_edges()
        self._unrepeatable = graph.unrepeatable()
        self._members = pipelined_regions(graph, self._kept) if self.vertices else []
        self._region = {key: n for n, members in enumerate(self._members) for key in members}
        self._alike: dict[int, bool] = {}
        """By vertex, whether its region sends the same rows to the same consumers in each run."""
        for joined in graph.joined() if self.vertices else ():
            outputs = {edge for vertex in joined for edge in graph.outputs_of(vertex)}
            self._alike |= dict.fromkeys(joined, all(map(graph.parts_alike, outputs)))
        self._together: set[TaskKey] = set()
        """Tasks to rerun that are not deployed yet."""
        self._ending: set[TaskKey] = set()
        """Tasks among them whose current attempt still runs."""

    # --- what happens ---------------------------------------------------------------------------

    def begin(self, keys: Iterable[TaskKey], tasks: Mapping[TaskKey, Subtask]) -> Rerun:
        """Start the rerun of pending tasks. Returns the tasks newly added to the set, these and others."""
        fresh = [key for key in keys if key[0] in self.vertices and key not in self._together]
        again = _Closure(self, tasks).of(fresh) if fresh else Rerun()
        again.tasks -= self._together
        self._together |= again.tasks
        self._ending.update(key for key in again.tasks if tasks[key].runs)
        return again

    def ended(self, key: TaskKey) -> None:
        """The current attempt of a subtask has ended, in any way."""
        self._ending.discard(key)

    def deployed(self, key: TaskKey) -> None:
        """The next attempt of a subtask runs."""
        self._together.discard(key)

    def give_up(self) -> None:
        """Drop the set: no task restarts any more."""
        self._together.clear()
        self._ending.clear()

    # --- what follows ---------------------------------------------------------------------------

    def must_end(self, key: TaskKey) -> bool:
        """Whether a subtask's attempt must end for its rerun, and still runs."""
        return key in self._ending

    def holds_back(self, key: TaskKey) -> bool:
        """Whether a subtask waits until attempts of others have ended."""
        return bool(self._ending) and key in self._together

    def deployed_with(self, keys: Iterable[TaskKey]) -> set[TaskKey]:
        """All tasks deployed together with any of these."""
        return set(self._together) if any(key in self._together for key in keys) else set()

    def take_ready(self) -> list[TaskKey]:
        """The tasks to deploy together now; empty while an attempt of any of them runs."""
        return [] if self._ending else sorted(self._together)

    def counts_for(self, key: TaskKey) -> TaskKey:
        """The subtask to which failures of this one are attributed: the first of its region."""
        return self._members[self._region[key]][0] if key[0] in self.vertices else key

    def cannot(self, keys: Iterable[TaskKey]) -> list[TaskKey]:
        """The tasks that cannot run again."""
        return [key for key in keys if key[0] in self._unrepeatable]

    # --- the journal ----------------------------------------------------------------------------

    def record(self) -> ReplaysRecord:
        """For the journal."""
        return tuple(sorted(self._together)), tuple(sorted(self._ending))

    def recall(self, record: ReplaysRecord) -> list[TaskKey]:
        """Restore from the record. Returns the tasks whose attempt has not ended yet."""
        self._together, self._ending = map(set, record)
        return sorted(self._ending)

    # --- the plan -------------------------------------------------------------------------------

    def of_region(self, key: TaskKey) -> list[TaskKey]:
        """All tasks of a subtask's pipelined region."""
        return self._members[self._region[key]]

    def is_alike(self, key: TaskKey) -> bool:
        """Whether a subtask sends the same rows to the same consumers in each run."""
        return self._alike[key[0]]

    def inputs(self, key: TaskKey, *, kept: bool) -> list[int]:
        """The input edges of a subtask whose partitions are stored (``kept``), or are not."""
        return [edge for edge in self.graph.inputs_of(key[0]) if (edge in self._kept) is kept]

    def outputs(self, key: TaskKey, *, kept: bool) -> list[int]:
        """The output edges of a subtask whose partitions are stored (``kept``), or are not."""
        return [edge for edge in self.graph.outputs_of(key[0]) if (edge in self._kept) is kept]


class _Closure:
    """The smallest set of tasks that contains the pending ones and is closed under the rules of the module's
    text."""

    def __init__(self, plan: Replays, tasks: Mapping[TaskKey, Subtask]) -> None:
        self._plan = plan
        self._tasks = tasks
        self._found: set[TaskKey] = set()
        self._others: set[TaskKey] = set()
        """Tasks found whose next attempt may send other rows, or rows to other consumers, than the one
        before."""
        self._todo: list[TaskKey] = []
        self._looked_at: set[tuple[int, str]] = set()
        """Edges between all subtasks that were followed, with the direction."""

    def of(self, keys: Iterable[TaskKey]) -> Rerun:
        self._add(keys)
        while self._todo:
            self._follow(self._todo.pop())
        return Rerun(self._found, set(self._plan.cannot(self._found)))

    def _add(self, keys: Iterable[TaskKey], *, others: bool = False) -> None:
        known = self._others if others else self._found
        fresh = [key for key in keys if key not in known and self._tasks[key].state != WAITING]
        self._found.update(fresh)
        self._todo += fresh
        if others:
            self._others.update(fresh)

    def _follow(self, key: TaskKey) -> None:
        plan, tasks = self._plan, self._tasks
        stored = [tasks[each] for each in self._producers(key, kept=True)]
        self._add(each.key for each in stored if each.state == "finished" and not each.on_worker)
        if key[0] not in plan.vertices:
            return
        if plan.is_alike(key) and key not in self._others:
            self._add(self._producers(key, kept=False))
            self._add(each for each in self._consumers(key, kept=False) if tasks[each].state != "finished")
            return
        self._add(plan.of_region(key), others=True)
        for reader in self._consumers(key, kept=True):
            if reader[0] in plan.vertices:
                self._add(plan.of_region(reader), others=True)
            elif tasks[reader].state != "finished":
                self._add([reader])

    def _producers(self, key: TaskKey, *, kept: bool) -> list[TaskKey]:
        """The producers of a subtask, except over edges already followed in this direction."""
        graph = self._plan.graph
        edges = [edge for edge in self._plan.inputs(key, kept=kept) if self._is_new(edge, "producers")]
        return [(graph.edges[edge].source, n) for edge in edges for n in graph.producers_of(edge, key[1])]

    def _consumers(self, key: TaskKey, *, kept: bool) -> list[TaskKey]:
        """The consumers of a subtask, except over edges already followed in this direction."""
        graph = self._plan.graph
        edges = [edge for edge in self._plan.outputs(key, kept=kept) if self._is_new(edge, "consumers")]
        return [(graph.edges[edge].target, n) for edge in edges for n in graph.consumers_of(edge, key[1])]

    def _is_new(self, edge: int, end: str) -> bool:
        """Whether an edge must be followed in this direction: once, if it connects all subtasks."""
        if self._plan.graph.edges[edge].pointwise:
            return True
        seen = (edge, end) in self._looked_at
        self._looked_at.add((edge, end))
        return not seen
