"""What runs again with a subtask of a replayed region, since it ended early or what it stored is lost. Pure.

A *replayed* region (:meth:`JobGraph.replayed`) can be read again from its beginning: its sources have an end
and no external client writes them, and its other inputs are stored. So no row is lost with a subtask of it:
the subtask runs again, and with it

- what feeds it over pipelined edges, back to sources and to stored partitions that are there; one that is not
  there is lost too;
- what it feeds over pipelined edges and has not finished: half of its rows came from the attempt before;
- all of the region, unless the plan says that the same rows go to the same consumers each time: what other
  members have written is of no use beside another division of the rows.

Members that have finished and whose partitions are there stay, and get the end alone of those that run again
(:class:`~minishuffle.coordinator.jobs.consumption.Ends`: their channels are read). A pipelined channel whose
link breaks may lack rows: its consumer fails then (``InputSpec.strict``), and so runs again.

Whoever reads a stored partition gives none of its rows out before it has all of them, and keeps these: so it
never mixes two attempts of a producer. If the same rows come again it hears of nothing: what it has is as
good. If not, it starts again with its own region, whether it has finished or not, and what that has published
counts as repeated. It does so too if it has given out nothing so far, since that is not known here in time.

What waits to be deployed has read nothing, and is never among them: it will read what is there then.

What clients write from outside cannot be read again: a job fails that stores it with a blocking edge and
loses it. (Flink restarts the region and all that is behind it, ``RestartPipelinedRegionFailoverStrategy``,
finished or not, since it has no plan to ask.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from minishuffle.coordinator.jobs.failover import pipelined_regions
from minishuffle.coordinator.jobs.lifecycle import WAITING, Subtask
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.plan.graph import JobGraph

__all__ = ["Again", "Replays"]


@dataclass(slots=True)
class Again:
    """What follows when subtasks are to run again."""

    tasks: set[TaskKey] = field(default_factory=set)
    """Those whose next attempt is deployed once the one that runs has ended."""
    unreadable: set[TaskKey] = field(default_factory=set)
    """Those of them that cannot run again: the job fails."""


ReplaysRecord: TypeAlias = tuple[tuple[TaskKey, ...], tuple[TaskKey, ...]]
"""What is deployed at one time, and what of it has yet to end."""


class Replays:
    """The subtasks of one job that run again together, and which of these have yet to end for that.

    Those that are to run again at one time are one set, whatever made them: nothing of it is deployed while
    an attempt of it runs.
    """

    def __init__(self, graph: JobGraph) -> None:
        self.vertices = graph.replayed()
        self.graph = graph
        self._kept = graph.kept_edges()
        self._unrepeatable = graph.unrepeatable()
        self._members = pipelined_regions(graph, self._kept) if self.vertices else []
        self._region = {key: n for n, members in enumerate(self._members) for key in members}
        self._alike: dict[int, bool] = {}
        """By vertex, whether its region gives the same rows to the same consumers when it runs again."""
        for joined in graph.joined() if self.vertices else ():
            outputs = {edge for vertex in joined for edge in graph.outputs_of(vertex)}
            self._alike |= dict.fromkeys(joined, all(map(graph.parts_alike, outputs)))
        self._together: set[TaskKey] = set()
        """Those that are to run again and are not deployed."""
        self._ending: set[TaskKey] = set()
        """Those of them whose attempt runs."""

    # --- what happens ---------------------------------------------------------------------------

    def begin(self, keys: Iterable[TaskKey], tasks: Mapping[TaskKey, Subtask]) -> Again:
        """These are pending: gives all that runs again with them and was not given before."""
        fresh = [key for key in keys if key[0] in self.vertices and key not in self._together]
        again = _Closure(self, tasks).of(fresh) if fresh else Again()
        again.tasks -= self._together
        self._together |= again.tasks
        self._ending.update(key for key in again.tasks if tasks[key].runs)
        return again

    def ended(self, key: TaskKey) -> None:
        """The current attempt of a subtask has ended, however."""
        self._ending.discard(key)

    def deployed(self, key: TaskKey) -> None:
        """The next attempt of a subtask runs."""
        self._together.discard(key)

    def give_up(self) -> None:
        """Nothing restarts any more."""
        self._together.clear()
        self._ending.clear()

    # --- what follows ---------------------------------------------------------------------------

    def asked(self, key: TaskKey) -> bool:
        """Whether the subtask is to end for this, and has yet to."""
        return key in self._ending

    def holds_back(self, key: TaskKey) -> bool:
        """Whether the subtask waits for others to end."""
        return bool(self._ending) and key in self._together

    def beside(self, keys: Iterable[TaskKey]) -> set[TaskKey]:
        """All that is deployed at one time with any of these."""
        return set(self._together) if any(key in self._together for key in keys) else set()

    def take_ready(self) -> list[TaskKey]:
        """What is to be deployed at one time, if nothing of it runs any more."""
        return [] if self._ending else sorted(self._together)

    def counts_for(self, key: TaskKey) -> TaskKey:
        """The subtask with which failures of this one count: the first of its region."""
        return self._members[self._region[key]][0] if key[0] in self.vertices else key

    def cannot(self, keys: Iterable[TaskKey]) -> list[TaskKey]:
        """Those that cannot run again."""
        return [key for key in keys if key[0] in self._unrepeatable]

    # --- the journal ----------------------------------------------------------------------------

    def record(self) -> ReplaysRecord:
        """For the journal."""
        return tuple(sorted(self._together)), tuple(sorted(self._ending))

    def recall(self, record: ReplaysRecord) -> list[TaskKey]:
        """Become what the record says; gives what has yet to end."""
        self._together, self._ending = map(set, record)
        return sorted(self._ending)

    # --- the plan -------------------------------------------------------------------------------

    def of_region(self, key: TaskKey) -> list[TaskKey]:
        """All that pipelined edges join with a subtask."""
        return self._members[self._region[key]]

    def is_alike(self, key: TaskKey) -> bool:
        """Whether the same rows come again from a subtask."""
        return self._alike[key[0]]

    def inputs(self, key: TaskKey, *, kept: bool) -> list[int]:
        """The edges that a subtask reads, of those whose partitions are stored or of the others."""
        return [edge for edge in self.graph.inputs_of(key[0]) if (edge in self._kept) is kept]

    def outputs(self, key: TaskKey, *, kept: bool) -> list[int]:
        """Those that it writes, likewise."""
        return [edge for edge in self.graph.outputs_of(key[0]) if (edge in self._kept) is kept]


class _Closure:
    """The least set of tasks that holds what is pending and all that follows from it."""

    def __init__(self, plan: Replays, tasks: Mapping[TaskKey, Subtask]) -> None:
        self._plan = plan
        self._tasks = tasks
        self._found: set[TaskKey] = set()
        self._others: set[TaskKey] = set()
        """Tasks found whose next attempt gives other rows than before, or to other consumers."""
        self._todo: list[TaskKey] = []
        self._looked_at: set[tuple[int, str]] = set()
        """Edges between all subtasks, and which of their ends."""

    def of(self, keys: Iterable[TaskKey]) -> Again:
        self._add(keys)
        while self._todo:
            self._follow(self._todo.pop())
        return Again(self._found, set(self._plan.cannot(self._found)))

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
        """What a subtask reads, without what others that were followed read of the same edge."""
        graph = self._plan.graph
        edges = [edge for edge in self._plan.inputs(key, kept=kept) if self._is_new(edge, "producers")]
        return [(graph.edges[edge].source, n) for edge in edges for n in graph.producers_of(edge, key[1])]

    def _consumers(self, key: TaskKey, *, kept: bool) -> list[TaskKey]:
        """What reads a subtask, likewise."""
        graph = self._plan.graph
        edges = [edge for edge in self._plan.outputs(key, kept=kept) if self._is_new(edge, "consumers")]
        return [(graph.edges[edge].target, n) for edge in edges for n in graph.consumers_of(edge, key[1])]

    def _is_new(self, edge: int, end: str) -> bool:
        """Whether that end of an edge is to be looked at: once, if each subtask has all of it."""
        if self._plan.graph.edges[edge].pointwise:
            return True
        seen = (edge, end) in self._looked_at
        self._looked_at.add((edge, end))
        return not seen
