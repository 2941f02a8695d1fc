"""The channels of a job that were read to the end, and the tasks to rerun when a worker is lost. Pure.

A partition of a finished producer is needed until each of its consumers has read it to the end, in any
attempt: successive attempts of a consumer read a channel one after the other, and after its end there are no
rows. A consumer reports each channel's end; when it finishes, all its channels have ended. Once no consumer
needs a partition, it is released. If its worker is lost earlier, the producer runs again, and writes only to
channels whose end was not read.

*Kept* partitions are different: each attempt of a consumer reads all of them. They are needed until all
consumers have finished, and their channels count as read only for the current attempt of a consumer. The same
holds for all inputs of a *replayed* consumer (:mod:`~minishuffle.coordinator.jobs.lostpartitions`), whose
producers run again with it.

*Retained* partitions, of a job with a guarantee, count as kept too: the next attempt of a consumer reads them
from where its snapshot was taken. A finished task may be needed for consumers of its consumers: once lost,
these go on from earlier snapshots, and ask it again. Where a task deals its rows out in turn, its next
attempt gives one consumer what another has had before, unless it makes the same rows. So consumers that have
finished run again with it, from their own snapshots.

A finished source whose partition is lost *repeats its rows* if the job waits for unavailable consumers: it
reads again from the position at which the lost attempt began. So does a source that is lost before any of
its consumers was deployed. Its rows keep their *version*, the attempt that made them first, and have the same
numbers, by which each consumer leaves out those that it has had: only rows from the lost worker's queues are
new to it. This is exact since the same rows come in the same order over each channel: a bounded source is
read split by split, and its chain must be deterministic, like a chain before a kept edge
(:meth:`JobGraph.kept_edges`). A consumer that restarted after the version began does not know the rows that
its earlier attempts have read, so it gets only the end of the channel.
Tasks with inputs do not repeat rows, since their producers do not send the inputs again.
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
    """The ended channels of a subtask, for its next attempt: see ``InputSpec.ended`` and
    ``OutputSpec.closed``."""

    ended: Mapping[int, list[int]]
    """Producers by edge."""
    closed: Mapping[int, list[int]]
    """Consumers by edge."""


LateEnds: TypeAlias = "tuple[Subtask, int, list[int]]"
"""A producer, one of its edges, and consumers that have read it to the end over this edge."""


EndsRecord: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Producers by edge."""


class Ends:
    """The channels of one job that were read to the end.

    Invariant: the count of each producer is the number of its channels not read to the end.
    """

    def __init__(self, graph: JobGraph, kept: frozenset[int], tasks: Mapping[TaskKey, Subtask]) -> None:
        self.repeating = repeating(graph, kept)
        """Source operators that repeat their rows after a loss."""
        self.round = 0
        """Number of rounds in which replacement attempts were deployed."""
        self._spent: list[TaskKey] = []
        """Producers whose partitions are no longer needed, until ReleaseJob is sent."""
        self.news: list[tuple[TaskKey, int, int]] = []
        """Channels whose end was read, as producer, edge and consumer, since the last
        :meth:`take_late_ends`."""
        self._graph = graph
        self._kept = kept
        self._tasks = tasks
        self._replayed = graph.replayed()
        self._read: dict[TaskKey, dict[int, int]] = {}
        """By consumer and edge, a bit mask of the producers read to the end."""
        self._unread: dict[TaskKey, int] = {}
        """By producer, the number of channels not read to the end; absent while none was read."""
        self._behind = {each: _behind(graph, each) for each in graph.snapshotted()}
        """Operators to which its rows lead, by operator that goes on from snapshots."""

    def read(self, consumer: TaskKey, edge: int, producers: Iterable[int]) -> list[TaskKey]:
        """Note that a consumer has read these producers to the end, perhaps repeatedly.

        Returns the producers that all consumers have now read. Producers without a channel to the consumer
        are ignored.
        """
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
        """Note that a consumer has finished, and so has read all its channels. Returns the producers that all
        consumers have now read."""
        complete = []
        for edge in self._graph.inputs_of(consumer[0]):
            complete += self.read(consumer, edge, self._graph.producers_of(edge, consumer[1]))
        return complete

    def spend(self, producers: Iterable[TaskKey]) -> None:
        """Release the partitions of these producers, if they have finished and no consumer needs them."""
        self._spent += [key for key in producers if self.is_spent(self._tasks[key])]

    def take_spent(self) -> list[Subtask]:
        """Remove and return the tasks whose partitions are to be released."""
        spent, self._spent = [self._tasks[key] for key in self._spent], []
        return [task for task in spent if task.on_worker and self.is_spent(task)]

    def next_round(self) -> None:
        """Begin a round in which replacement attempts are deployed."""
        self.round += 1

    def reset_consumer(self, consumer: TaskKey) -> None:
        """Count the channels that the next attempt of a consumer reads from the beginning as unread: kept
        ones, or all if the consumer is replayed."""
        masks = self._read.get(consumer, {})
        for edge in list(masks) if consumer[0] in self._replayed else self._kept & masks.keys():
            for producer in _members(masks.pop(edge)):
                self._unread[self._graph.edges[edge].source, producer] += 1

    def start_over(self) -> None:
        """All tasks begin again: nothing is read to its end."""
        for table in (self._read, self._unread, self._spent, self.news):
            table.clear()

    def _left(self, producer: TaskKey) -> int:
        left = self._unread.get(producer)
        if left is None:
            outputs = self._graph.outputs_of(producer[0])
            left = sum(len(self._graph.consumers_of(edge, producer[1])) for edge in outputs)
        return left

    def all_read(self, producer: TaskKey) -> bool:
        """Whether all consumers have read the producer to its end."""
        return self._unread.get(producer) == 0

    def is_read(self, edge: int, producer: int, consumer: int) -> bool:
        """Whether a channel was read to the end."""
        masks = self._read.get((self._graph.edges[edge].target, consumer))
        return masks is not None and bool(masks.get(edge, 0) >> producer & 1)

    def read_between(self, producer: TaskKey, consumer: TaskKey) -> bool:
        """Whether the consumer reads from the producer, and has read all its channels to the end."""
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
        """The late ends (:meth:`is_late_end`) reported since the last call."""
        found: dict[tuple[TaskKey, int], list[int]] = {}
        for producer, edge, consumer in self.news:
            if self.is_late_end(producer, edge, consumer):
                found.setdefault((producer, edge), []).append(consumer)
        self.news.clear()
        return [(self._tasks[producer], edge, consumers) for (producer, edge), consumers in found.items()]

    def late_ends(self, producer: TaskKey) -> list[LateEnds]:
        """All late ends (:meth:`is_late_end`) of a producer."""
        task = self._tasks[producer]
        if task.attempt == FIRST_ATTEMPT:
            return []
        found = [
            (task, edge, [n for n in consumers if self.is_late_end(producer, edge, n)])
            for edge, consumers in self.done(producer).closed.items()
        ]
        return [each for each in found if each[2]]

    def is_late_end(self, producer: TaskKey, edge: int, consumer: int) -> bool:
        """Whether the producer's current attempt must learn of an end, because it may wait for the consumer
        to attach.

        The consumer has read the end, perhaps of an earlier attempt of the producer: it was deployed in an
        earlier round. Example: ``map[0]`` has read ``source[0]`` #1 to its end; ``source[0]`` #2 is deployed,
        and waits for ``map[0]`` until it gets this end. A consumer deployed in the same round or later has
        read the end of the current attempt, after all its rows.
        """
        task, reader = self._tasks[producer], self._tasks[self._graph.edges[edge].target, consumer]
        there = task.on_worker and task.state in ("created", "running", "finished")
        return there and task.attempt > FIRST_ATTEMPT and reader.round < task.round

    def needed(self, producer: TaskKey, but: Collection[str] = frozenset({"finished"})) -> bool:
        """Whether a consumer must still read the partition of a finished producer. Consumers in the states
        ``but`` do not count."""
        operator, index = producer
        if (behind := self._behind.get(operator)) is not None:
            widths = {each: self._graph.vertices[each].parallelism for each in behind}
            return any(self._tasks[each, n].state not in but for each in behind for n in range(widths[each]))
        if self.all_read(producer) and not self._kept:
            return False
        return any(
            self._tasks[self._graph.edges[edge].target, consumer].state not in but
            and (edge in self._kept or not self.is_read(edge, index, consumer))
            for edge in self._graph.outputs_of(operator)
            for consumer in self._graph.consumers_of(edge, index)
        )

    def tasks_to_rerun(self, lost: Iterable[Subtask], here: Iterable[Subtask]) -> list[Subtask]:
        """Finished tasks that must run again, because their partitions are lost and a consumer still has to
        read them.

        Args:
            lost: tasks whose attempt is lost and restarts; they read kept partitions again from the
                beginning.
            here: tasks of the worker that is lost now.
        """
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

    def dealt_otherwise(self, producer: Subtask) -> list[Subtask]:
        """The finished consumers of a task with a guarantee to which its next attempt may deal other rows."""
        if producer.operator not in self._behind or producer.same_rows:
            return []
        return [
            task
            for edge in self._graph.outputs_of(producer.operator)
            for consumer in self._graph.consumers_of(edge, producer.index)
            if (task := self._tasks[self._graph.edges[edge].target, consumer]).state == "finished"
            and not self._graph.parts_alike(edge)
        ]

    def dealt_since(self, dealt: Iterable[tuple[int, int, int]]) -> Subtask | None:
        """A producer that has begun another version of its rows than a finished consumer had read: it was
        deployed before that was known. None: there is no such producer."""
        for edge, index, version in dealt:
            producer = self._tasks[self._graph.edges[edge].source, index]
            if producer.version != version:
                return producer
        return None

    def is_released(self, producer: TaskKey) -> bool:
        """Whether no consumer will need the partitions of a producer once it has finished."""
        operator = producer[0]
        return (
            self.all_read(producer) and not self.keeps(operator) and not self._graph.vertices[operator].stream
        )

    def is_spent(self, task: Subtask) -> bool:
        """Whether a task has finished and its partitions are no longer needed. A sink has none."""
        return task.state == "finished" and self.is_released(task.key)

    def keeps(self, operator: int) -> bool:
        """Whether partitions of this operator are kept."""
        return not self._kept.isdisjoint(self._graph.outputs_of(operator))

    def is_kept(self, edge: int) -> bool:
        """Whether the partitions of this edge are kept."""
        return edge in self._kept

    def done(self, key: TaskKey) -> EndedChannels:
        """The channels of a subtask that were read to the end, except over kept edges."""
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
        """The ended channels for the attempt that is deployed now. If it repeats rows, the channels to stale
        consumers (:func:`is_stale`) count as ended. If these go on from snapshots, it is those that have
        finished for good: nobody would read what is retained for them."""
        task, done = self._tasks[key], self.done(key)
        if task.operator in self._behind:
            return EndedChannels(done.ended, self._over(task))
        if task.version == task.attempt:
            return done
        closed = {edge: list(consumers) for edge, consumers in done.closed.items()}
        for edge in self._graph.outputs_of(task.operator):
            target = self._graph.edges[edge].target
            consumers = self._graph.consumers_of(edge, task.index)
            stale = {n for n in consumers if is_stale(self._tasks[target, n], task)}
            closed[edge] = sorted(stale.union(closed.get(edge, ())))
        return EndedChannels(done.ended, closed)

    def _over(self, task: Subtask) -> dict[int, list[int]]:
        """The consumers of a task that have finished and that no restart needs any more, by edge."""
        found = {}
        for edge in self._graph.outputs_of(task.operator):
            target = self._graph.edges[edge].target
            keys = [(target, n) for n in self._graph.consumers_of(edge, task.index)]
            found[edge] = [
                key[1] for key in keys if self._tasks[key].state == "finished" and not self.needed(key)
            ]
        return found

    def channels_left(self, key: TaskKey) -> tuple[int, int]:
        """The numbers of channels to producers and to consumers not read to the end."""
        operator, index = key
        inputs = sum(len(self._graph.producers_of(edge, index)) for edge in self._graph.inputs_of(operator))
        return inputs - sum(mask.bit_count() for mask in self._read.get(key, {}).values()), self._left(key)

    def record(self, consumer: TaskKey) -> EndsRecord:
        """For the journal: the producers that a consumer has read to the end, by edge."""
        return tuple((edge, tuple(_members(mask))) for edge, mask in self._read.get(consumer, {}).items())

    def recall(self, consumer: TaskKey, record: EndsRecord, round: int) -> None:
        """Restore from the record; the consumer's attempt was deployed in ``round``."""
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


def _behind(graph: JobGraph, operator: int) -> set[int]:
    """The operators to which rows of one lead."""
    found, fresh = set[int](), [operator]
    while fresh:
        targets = {graph.edges[edge].target for edge in graph.outputs_of(fresh.pop())} - found
        found |= targets
        fresh += targets
    return found


# --- what follows ---------------------------------------------------------------------------------


def repeating(graph: JobGraph, kept: frozenset[int]) -> frozenset[int]:
    """The source operators that repeat their rows after a loss, see the module's text. ``kept`` are edges.
    With a guarantee none do: all tasks go on from snapshots."""
    if graph.settings.restart_strategy != "individual" or graph.on_unavailable != "wait":
        return frozenset()
    if graph.settings.is_guaranteed:
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
    """Whether earlier attempts of a consumer may have read rows of the producer's version."""
    if consumer.state == WAITING:
        return False
    if consumer.state in PENDING or consumer.state not in ("created", "running", "finished"):
        return True
    return consumer.attempt > FIRST_ATTEMPT and consumer.round > producer.version_round
