"""Which subtasks of one job have read which partitions to the end, and what follows when a worker is lost.
Pure.

A partition of a finished producer is needed until each of its consumers has read it to the end, in whichever
attempt: the rows of a channel go to one consumer attempt after the other, and behind the end there are none.
A consumer says so over each channel, and for all of them when it finishes. When nobody needs it any more the
partition is released. If its worker is lost before, the producer runs again, and what it writes goes to the
channels alone whose end was not read.

Partitions that are kept are another matter: each attempt of a consumer reads all of them, so they are needed
until all consumers have finished, and here their ends are those that the current attempts have read. So are
the ends of all that a *replayed* consumer reads (:mod:`~minishuffle.coordinator.jobs.lostpartitions`):
whatever feeds it runs again with it.

A source that had finished, in a job that waits, *writes its rows once more*: from where the lost attempt had
begun, its *base*. So does one that is lost before any of its consumers was deployed. Of these rows each
consumer leaves out as many as it has taken since the base, so that what was in the lost worker's queues is
all that is new. That is exact because the same rows come in the same order over each channel: a bounded
source is read split by split, and its chain has to make the same of it, as that of a side which is kept
(:meth:`JobGraph.kept_edges`). A consumer that has itself restarted since the base cannot know what its former
attempts took: it gets the end alone. Tasks that have inputs write nothing once more: nobody sends them their
rows again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from minishuffle.coordinator.jobs.lifecycle import PENDING, WAITING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.plan.graph import JobGraph

__all__ = ["EndedChannels", "Ends", "LateEnds", "is_stale", "repeating"]


class EndedChannels(NamedTuple):
    """What the next attempt of a subtask is to know: see ``InputSpec.ended`` and ``OutputSpec.closed``."""

    ended: Mapping[int, list[int]]
    """By edge, producers."""
    closed: Mapping[int, list[int]]
    """By edge, consumers."""


LateEnds: TypeAlias = "tuple[Subtask, int, list[int]]"
"""A producer, an edge, and consumers."""


EndsRecord: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""By edge, producers."""


class Ends:
    """The channels of one job whose end was read.

    Invariant: the count of each producer is that of its channels whose end was not.
    """

    def __init__(self, graph: JobGraph, kept: frozenset[int], tasks: Mapping[TaskKey, Subtask]) -> None:
        self.repeating = repeating(graph, kept)
        """Sources whose subtasks write their rows once more."""
        self.round = 0
        """How often attempts that take the place of others were deployed."""
        self._spent: list[TaskKey] = []
        """Producers whose partitions nobody needs any more, until ReleaseJob is sent."""
        self.news: list[tuple[TaskKey, int, int]] = []
        """Channels whose end was read, by producer, edge and consumer, until somebody looks."""
        self._graph = graph
        self._kept = kept
        self._tasks = tasks
        self._replayed = graph.replayed()
        self._read: dict[TaskKey, dict[int, int]] = {}
        """By consumer and edge: the bit of each producer that was read."""
        self._unread: dict[TaskKey, int] = {}
        """By producer, of those that any channel was read of."""

    def read(self, consumer: TaskKey, edge: int, producers: Iterable[int]) -> list[TaskKey]:
        """A consumer has read these to the end, maybe not for the first time; gives those that nobody has
        yet to read. What no channel is there for changes nothing."""
        if not (0 <= edge < len(self._graph.edges)) or self._graph.edges[edge].target != consumer[0]:
            return []
        there, source = self._graph.producers_of(edge, consumer[1]), self._graph.edges[edge].source
        masks = self._read.setdefault(consumer, {})
        mask, complete = masks.get(edge, 0), []
        for producer in producers:
            if producer in there and not mask >> producer & 1:
                mask |= 1 << producer
                key = (source, producer)
                self.news.append((key, edge, consumer[1]))
                self._unread[key] = left = self._left(key) - 1
                if not left:
                    complete.append(key)
        masks[edge] = mask
        return complete

    def finished(self, consumer: TaskKey) -> list[TaskKey]:
        """A consumer has finished, and so read all; gives those that nobody has yet to read."""
        complete = []
        for edge in self._graph.inputs_of(consumer[0]):
            complete += self.read(consumer, edge, self._graph.producers_of(edge, consumer[1]))
        return complete

    def spend(self, producers: Iterable[TaskKey]) -> None:
        """The partitions of these are released if they have finished and nobody needs them."""
        self._spent += [key for key in producers if self.is_spent(self._tasks[key])]

    def take_spent(self) -> list[Subtask]:
        """Tasks that are to be released, and were not given before."""
        spent, self._spent = [self._tasks[key] for key in self._spent], []
        return [task for task in spent if task.on_worker and self.is_spent(task)]

    def next_round(self) -> None:
        """Attempts are about to be deployed that take the place of others."""
        self.round += 1

    def reset_consumer(self, consumer: TaskKey) -> None:
        """The next attempt of a consumer reads all of what is kept, or of everything."""
        masks = self._read.get(consumer, {})
        for edge in list(masks) if consumer[0] in self._replayed else self._kept & masks.keys():
            for producer in _members(masks.pop(edge)):
                self._unread[self._graph.edges[edge].source, producer] += 1

    def _left(self, producer: TaskKey) -> int:
        left = self._unread.get(producer)
        if left is None:
            outputs = self._graph.outputs_of(producer[0])
            left = sum(len(self._graph.consumers_of(edge, producer[1])) for edge in outputs)
        return left

    def all_read(self, producer: TaskKey) -> bool:
        """Whether nobody has yet to read the producer to its end."""
        return self._unread.get(producer) == 0

    def is_read(self, edge: int, producer: int, consumer: int) -> bool:
        """Whether that channel was read to the end."""
        masks = self._read.get((self._graph.edges[edge].target, consumer))
        return masks is not None and bool(masks.get(edge, 0) >> producer & 1)

    def read_between(self, producer: TaskKey, consumer: TaskKey) -> bool:
        """Whether the consumer reads from the producer, and has read all of it."""
        if consumer not in self._read:
            return False
        edges = [
            edge
            for edge in self._graph.outputs_of(producer[0])
            if self._graph.edges[edge].target == consumer[0]
            and consumer[1] in self._graph.consumers_of(edge, producer[1])
        ]
        return bool(edges) and all(self.is_read(edge, producer[1], consumer[1]) for edge in edges)

    def take_late_ends(self) -> list[LateEnds]:
        """What :meth:`is_late_end` is true of, of all that was heard since the last call."""
        found: dict[tuple[TaskKey, int], list[int]] = {}
        for producer, edge, consumer in self.news:
            if self.is_late_end(producer, edge, consumer):
                found.setdefault((producer, edge), []).append(consumer)
        self.news.clear()
        return [(self._tasks[producer], edge, consumers) for (producer, edge), consumers in found.items()]

    def ends_of(self, producer: TaskKey) -> list[LateEnds]:
        """The same of all that was ever heard of a producer."""
        task = self._tasks[producer]
        if task.attempt == FIRST_ATTEMPT:
            return []
        found = [
            (task, edge, [n for n in consumers if self.is_late_end(producer, edge, n)])
            for edge, consumers in self.done(producer).closed.items()
        ]
        return [each for each in found if each[2]]

    def is_late_end(self, producer: TaskKey, edge: int, consumer: int) -> bool:
        """Whether the current attempt of a producer may wait for a consumer, which is known to have read the
        end, to attach: it was deployed later than that, so the end may be that of an attempt before it. (A
        consumer that was deployed with it, or later, has read its own end, behind all of its rows.)"""
        task, reader = self._tasks[producer], self._tasks[self._graph.edges[edge].target, consumer]
        there = task.on_worker and task.state in ("created", "running", "finished")
        return there and task.attempt > FIRST_ATTEMPT and reader.round < task.round

    def needed(self, producer: TaskKey, but: Collection[str] = frozenset({"finished"})) -> bool:
        """Whether some consumer, ``but`` those in these states, has to read what a producer that has finished
        wrote."""
        operator, index = producer
        if self.all_read(producer) and not self._kept:
            return False
        return any(
            self._tasks[self._graph.edges[edge].target, consumer].state not in but
            and (edge in self._kept or not self.is_read(edge, index, consumer))
            for edge in self._graph.outputs_of(operator)
            for consumer in self._graph.consumers_of(edge, index)
        )

    def tasks_to_rerun(self, lost: Iterable[Subtask], here: Iterable[Subtask]) -> list[Subtask]:
        """Finished tasks, ``here`` and on workers lost before, whose partitions are lost while some consumer
        has to read them: it has yet to come to their end, or starts again with what is kept."""
        found = {task.key: task for task in here if task.state == "finished" and self.needed(task.key)}
        fresh = [*(task.key for task in lost), *found]
        while fresh:
            consumer = fresh.pop()
            for key in self._graph.producers(*consumer):
                task = self._tasks[key]
                gone = task.state == "finished" and not task.on_worker and key not in found
                if gone and (self.keeps(key[0]) or not self.read_between(key, consumer)):
                    found[key] = task
                    fresh.append(key)
        return list(found.values())

    def is_released(self, producer: TaskKey) -> bool:
        """Whether the partitions of a producer, once it has finished, are of no use to anybody."""
        operator = producer[0]
        return (
            self.all_read(producer) and not self.keeps(operator) and not self._graph.vertices[operator].stream
        )

    def is_spent(self, task: Subtask) -> bool:
        """Whether it has finished, and nobody needs its partitions any more. Sinks have none to be freed."""
        return task.state == "finished" and self.is_released(task.key)

    def keeps(self, operator: int) -> bool:
        """Whether what that operator writes is kept."""
        return not self._kept.isdisjoint(self._graph.outputs_of(operator))

    def is_kept(self, edge: int) -> bool:
        """Whether what is written over that edge is."""
        return edge in self._kept

    def done(self, key: TaskKey) -> EndedChannels:
        """Those channels of a subtask that were read to the end, without those that are kept."""
        operator, index = key
        masks = self._read.get(key, {})
        ended = {edge: _members(mask) for edge, mask in masks.items() if edge not in self._kept}
        closed = {
            edge: [n for n in self._graph.consumers_of(edge, index) if self.is_read(edge, index, n)]
            for edge in self._graph.outputs_of(operator)
            if edge not in self._kept and self._unread.get(key) is not None
        }
        return EndedChannels(ended, closed)

    def ended_channels(self, key: TaskKey) -> EndedChannels:
        """What the attempt of a subtask that is being deployed is to know."""
        task, done = self._tasks[key], self.done(key)
        if task.base == task.attempt:
            return done
        closed = {edge: list(consumers) for edge, consumers in done.closed.items()}
        for edge in self._graph.outputs_of(task.operator):
            target = self._graph.edges[edge].target
            consumers = self._graph.consumers_of(edge, task.index)
            stale = {n for n in consumers if is_stale(self._tasks[target, n], task)}
            closed[edge] = sorted(stale.union(closed.get(edge, ())))
        return EndedChannels(done.ended, closed)

    def channels_left(self, key: TaskKey) -> tuple[int, int]:
        """How many channels to producers and to consumers a subtask has which were not read to the end."""
        operator, index = key
        inputs = sum(len(self._graph.producers_of(edge, index)) for edge in self._graph.inputs_of(operator))
        return inputs - sum(mask.bit_count() for mask in self._read.get(key, {}).values()), self._left(key)

    def record(self, consumer: TaskKey) -> EndsRecord:
        """For the journal: what a consumer has read, by edge."""
        return tuple((edge, tuple(_members(mask))) for edge, mask in self._read.get(consumer, {}).items())

    def recall(self, consumer: TaskKey, record: EndsRecord, round: int) -> None:
        """Become what the record says; the attempt of the consumer was deployed in that round."""
        self.round = max(self.round, round)
        for edge, producers in record:
            self.read(consumer, edge, producers)
        self.news.clear()

    def validate(self) -> None:
        """Check the invariant; for tests."""
        for (operator, index), left in self._unread.items():
            assert left == sum(
                not self.is_read(edge, index, consumer)
                for edge in self._graph.outputs_of(operator)
                for consumer in self._graph.consumers_of(edge, index)
            )


def _members(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


# --- what follows ---------------------------------------------------------------------------------


def repeating(graph: JobGraph, kept: frozenset[int]) -> frozenset[int]:
    """The operators whose subtasks write their rows once more: see the text above. ``kept`` are edges."""
    if graph.settings.restart_strategy != "individual" or graph.on_unavailable != "wait":
        return frozenset()
    replayed = graph.replayed()
    return frozenset(
        operator
        for operator, vertex in enumerate(graph.vertices)
        if vertex.is_source
        and vertex.is_repeatable
        and operator not in replayed
        and kept.isdisjoint(graph.outputs_of(operator))
    )


def is_stale(consumer: Subtask, producer: Subtask) -> bool:
    """Whether former attempts of a consumer may have taken rows since the base of a producer."""
    if consumer.state == WAITING:
        return False
    if consumer.state in PENDING or consumer.state not in ("created", "running", "finished"):
        return True
    return consumer.attempt > FIRST_ATTEMPT and consumer.round > producer.base_round
