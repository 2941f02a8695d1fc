"""The job graph as it crosses the wire: vertices (chains), edges as patterns, and job settings.

Edges never list pairs of subtasks: :meth:`JobGraph.inputs_of` and :meth:`JobGraph.outputs_of`
compute a subtask's neighbours from the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from minishuffle import limits
from minishuffle.errors import InvalidGraph
from minishuffle.wire.control import unpack_bounded

__all__ = [
    "Edge",
    "Guarantee",
    "JobGraph",
    "JobSettings",
    "PartitionKind",
    "Placement",
    "StatefulOperator",
    "Vertex",
]

Placement: TypeAlias = tuple[int, ...]
"""The worker id of each slot of a job; see :meth:`JobGraph.first_slots`."""
Guarantee: TypeAlias = Literal["loss", "at_least_once"]
PartitionKind: TypeAlias = Literal["pipelined", "pipelined_bounded", "blocking"]
"""How the partitions of an edge hold what is written: in memory, as many segments as the worker has free;
in memory, so many segments for each consumer; stored, and given to no consumer before they are complete.
(Flink: ``ResultPartitionType``.)"""


def _checked_timeout(seconds: float) -> float:
    """Seconds from 0 on, or -1."""
    if seconds >= 0 or seconds == -1:
        return seconds
    raise PydanticCustomError("buffer_timeout", "Input should be seconds from 0 on, or -1")


class JobSettings(BaseModel):
    """Options of one job that workers need; seconds and counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    buffers_per_channel: int = Field(limits.BUFFERS_PER_CHANNEL_DEFAULT, ge=0, le=limits.JOB_BUFFERS_MAX)
    floating_buffers_per_gate: int = Field(
        limits.FLOATING_BUFFERS_PER_GATE_DEFAULT, ge=1, le=limits.JOB_BUFFERS_MAX
    )
    flow_control: Literal["credit", "tcp"] = "credit"
    """What holds a producer up whose consumer is on another worker: credit for each buffer, or ``tcp`` alone,
    as before there was credit: one slow consumer then stops its siblings."""
    buffer_timeout: Literal["adaptive"] | Annotated[float, AfterValidator(_checked_timeout)] = "adaptive"
    """When a buffer that is not full is sent. ``adaptive``: at once while its channel has credit and the link
    is idle, so that elements gather while it is not; 0: after every element; -1: never; else so many seconds
    after the first element in it."""
    restart_strategy: Literal["individual", "region", "full", "none"] = "individual"
    """What restarts when a task fails or is lost: it alone, all that exchanges connect with it, or all of the
    job; with ``none`` the job fails."""
    restart_failures_max: int = Field(
        limits.RESTART_FAILURES_MAX_DEFAULT, ge=1, le=limits.RESTART_FAILURES_MAX
    )
    """Failures of one subtask within RESTART_FAILURE_WINDOW_SECONDS that end the job."""
    restart_mistakes_max: int = Field(
        limits.RESTART_MISTAKES_MAX_DEFAULT, ge=1, le=limits.RESTART_FAILURES_MAX
    )
    """Failures of one subtask in a row that end the job if no attempt got a row done and all have the same
    error, one of those that code which is wrong raises each time (NameError, KeyError, …)."""
    on_unavailable: Literal["drop", "wait"] | None = None
    """What a producer does with rows for a consumer that is restarting. None: ``drop`` if any source of the
    job is endless, else ``wait``."""
    source_lease: int | None = Field(None, ge=0, le=limits.SOURCE_LEASE_ROWS_MAX)
    """Rows of each split that a source may emit beyond the position that it has reported: so many may be lost
    when its worker is, and none are repeated. None: what it emits in 0.31 s, at least a batch; of
    what other programs write, at first up to four times what has come. 0: it restarts at the position, and
    the rows behind it that it had emitted are repeated."""
    latency_interval: float = Field(0.0, ge=0, le=3600)
    """Seconds between two latency markers of a source's subtask; 0: there are none."""
    latency_granularity: Literal["single", "operator", "subtask"] = "operator"
    """Which latencies a subtask keeps apart: none, those from each source, or from each of its subtasks."""
    debloat_target: float = Field(0.0, ge=0, le=3600)
    """Seconds in which what is in flight to a task is consumed: producers put less into each buffer while
    their consumers are slow. 0: buffers are always filled. (Flink:
    ``taskmanager.network.memory.buffer-debloat.target``.)"""
    schedule: Literal["eager", "first_output", "stages"] = "eager"
    """When tasks are deployed: all at once; each vertex when there is something for it to read; or each
    stage, which pipelined edges join, when what it reads is complete."""
    start_when: Literal["any", "all"] | None = None
    """How many inputs of a vertex or stage have to be there for that. None: ``any`` of a vertex, ``all`` of a
    stage."""
    guarantee: Guarantee = "loss"
    """What becomes of rows and state when a task fails or is lost. ``loss``: those in its process are lost,
    and counted. ``at_least_once``: none; its next attempt goes on from a local snapshot of it, which another
    worker holds, and its producers send again what came after that. What it refuses is in
    :mod:`~minishuffle.plan.guarantee`. (Flink: ``execution.checkpointing.mode``.)"""
    snapshot_interval: float = Field(1.0, gt=0, le=3600)
    """Seconds between two local snapshots of a task."""
    snapshot_cost_max: float = Field(0.03, gt=0, le=1)
    """Greatest part of its time that a task takes local snapshots: they come later where it would be more."""

    durable_interval: float = Field(30.0, ge=0, le=86_400)
    """Seconds between two durable snapshots of a whole job with a guarantee, in ``snapshot_dir``, to which it
    goes back if a task is lost with the holder of its snapshots; 0: there are none. (Flink:
    ``execution.checkpointing.interval``.)"""

    @model_validator(mode="after")
    def _scheduled(self) -> JobSettings:
        if self.schedule == "eager" and self.start_when is not None:
            raise PydanticCustomError(
                "start_when",
                "start_when is about schedules that wait for inputs: set schedule to first_output or stages",
            )
        return self

    @property
    def starts_when(self) -> Literal["any", "all"]:
        """``start_when``, as it was given or is by default."""
        return self.start_when or ("any" if self.schedule == "first_output" else "all")

    @property
    def is_guaranteed(self) -> bool:
        """Whether no row may be lost."""
        return self.guarantee != "loss"

    @property
    def aligns_in_passing(self) -> bool:
        """Whether a channel can be held back behind a barrier while others are read: each has buffers and
        credit of its own."""
        return self.flow_control == "credit" and self.buffers_per_channel > 0


class StatefulOperator(BaseModel):
    """An operator that may hold state, or a source, whose state is where it is in its splits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """The same in each plan of the job that has the step."""
    name: str
    kind: str
    """What reads that state; ``source``: a source."""
    keys: list[str] = Field(default_factory=list)
    """The names of the columns that it goes by; none: keys are values of Python."""
    outputs: list[str] = Field(default_factory=list)
    """The names of its aggregates."""
    reads: dict[str, str] = Field(default_factory=dict)
    """What its state is made of, by what of it: ``keys`` their types, ``windows`` which ones, ``aggregate
    NAME`` its function and the type of its column, ``splits`` which records are in each. State of another it
    cannot read."""


class Vertex(BaseModel):
    """A chain of functions that share a thread. ``program`` is as
    :mod:`~minishuffle.plan.programs` packs it; workers open it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    parallelism: int = Field(ge=1, le=limits.PARALLELISM_MAX)
    operators: Annotated[list[str], FailFast()]
    is_source: bool
    bounded: bool = True
    replayable: bool = True
    """False: its source cannot read again what it has given."""
    acknowledges: bool = False
    """Its source says outside what need not be kept there any more: it gives all else again."""
    by_order: bool = False
    """What it gives depends on the rows that come to it, and their order, alone; of a source: on where it
    begins, if it reads one split."""
    in_turn: bool = False
    """Its source reads several splits in turn, whatever each of them has just then: from two on, their
    records come in another order each time."""
    program: bytes
    slot_group: str = ""
    """Vertices of one group share slots, and no others; ``""`` is that of those which name none."""
    stream: str = ""
    """The name under which external clients write the records of a source without splits."""
    sink: str = ""
    """The name of a sink whose batches are kept for external clients to read."""
    stream_schema: bytes = b""
    """An Arrow schema as an IPC message."""
    sink_schema: bytes = b""
    collects: str = ""
    """The name of a sink whose rows the client gets."""
    keeps: str = ""
    """The name of a sink that keeps rows in its process alone, until its task ends."""
    states: Annotated[list[StatefulOperator], FailFast()] = Field(default_factory=list)
    """Those among its operators."""

    @property
    def is_repeatable(self) -> bool:
        """Whether all that it gives can be made again: it ends, and what it reads from outside is still
        there.

        Whether it is the same, in the same order, is another matter. It follows from what comes to its
        operators:

        ==================================================  ================================================
        operators                                           what they give depends on
        ==================================================  ================================================
        map, filter, flat_map, map_async, columns, key_by   each row
        reduce, fold, count, aggregate, process, windows,   the order of rows, over all channels together:
        sessions, distinct, top_n, joins                    the same where all come by one channel
        values once a batch, combining, map_batches; the    that, and how rows are cut into batches: a task
        order of left, right, full and semi joins           takes small ones together that wait
        event_time() (when watermarks go out), idle_after,  that, and the clock
        timers of the wall clock, ttl, timeouts
        ==================================================  ================================================

        Functions of users are taken to give the same of the same. The proof for operators with state is
        ``tests/operators/test_state_parts_order.py``.
        """
        return self.bounded and self.replayable and not self.stream


class Edge(BaseModel):
    """``source`` and ``target`` are vertex indices; ``input`` is the target's input number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: int
    target: int
    input: int = 0
    partitioner: Literal["hash", "rebalance", "rescale", "forward", "broadcast", "custom"]
    kind: PartitionKind = "pipelined_bounded"
    because_of: int | None = None
    """The blocking edge for whose sake this one is blocking too, though the job does not say so: see
    :mod:`~minishuffle.plan.stages`."""

    @property
    def pointwise(self) -> bool:
        return self.partitioner in ("rescale", "forward")


class JobGraph(BaseModel):
    """Vertices and edges, both named by their index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vertices: Annotated[list[Vertex], FailFast()]
    edges: Annotated[list[Edge], FailFast()]
    settings: JobSettings = JobSettings()

    @model_validator(mode="after")
    def _consistent(self) -> JobGraph:
        for number, edge in enumerate(self.edges):
            for end in (edge.source, edge.target):
                if not 0 <= end < len(self.vertices):
                    raise ValueError(f"edge {number} names vertex {end}, which does not exist")
            if edge.kind == "blocking" and not self.vertices[edge.source].bounded:
                raise ValueError(f"blocking edge {number} comes from a source without an end")
            if edge.partitioner == "forward":
                source, target = self.vertices[edge.source], self.vertices[edge.target]
                if source.parallelism != target.parallelism:
                    raise ValueError(f"forward edge {number} joins different parallelisms")
        return self

    @property
    def on_unavailable(self) -> Literal["drop", "wait"]:
        """What producers of this job do with rows for a consumer that is restarting."""
        endless = any(vertex.is_source and not vertex.bounded for vertex in self.vertices)
        if self.settings.is_guaranteed:
            return "wait"
        return self.settings.on_unavailable or ("drop" if endless else "wait")

    def kept_edges(self) -> frozenset[int]:
        """Edges whose partitions are kept, so that a consumer which starts anew gets all of them again: those
        that are blocking, and if tasks restart sides that are broadcast."""
        blocking = {number for number, edge in enumerate(self.edges) if edge.kind == "blocking"}
        return self._sides().union(blocking)

    def _sides(self) -> frozenset[int]:
        """Bounded sides that are broadcast (an input other than 0: nothing is emitted for them alone), and
        what leads to them, if it leads nowhere else and comes out the same when it runs again. With a
        guarantee such edges are retained as all others are."""
        if self.settings.restart_strategy == "none" or self.settings.is_guaranteed:
            return frozenset()
        kept = {n for n, vertex in enumerate(self.vertices) if vertex.bounded and self.outputs_of(n)}
        sides = set(filter(self.is_read_first, range(len(self.edges))))

        def repeatable(vertex: int) -> bool:
            inputs = self.inputs_of(vertex)
            return all(
                each in sides or self.edges[each].target in kept for each in self.outputs_of(vertex)
            ) and all(self.edges[each].source in kept and self.parts_alike(each) for each in inputs)

        while others := {vertex for vertex in kept if not repeatable(vertex)}:
            kept -= others
        return frozenset(number for number, edge in enumerate(self.edges) if edge.source in kept)

    def replayed(self) -> frozenset[int]:
        """Vertices that run again from their beginning, with all that runs at one time with them, instead of
        going on where they were lost: those that read or write a blocking edge, and those that pipelined
        edges join with them, if all of these end, none takes what external clients write, and all sources
        among them can be read again."""
        blocking = [edge for edge in self.edges if edge.kind == "blocking"]
        if self.settings.restart_strategy == "none" or not blocking:
            return frozenset()
        return frozenset(
            vertex
            for joined in self.joined()
            if any({edge.source, edge.target} & joined for edge in blocking)
            and all(self.vertices[each].is_repeatable for each in joined)
            for vertex in joined
        )

    def snapshotted(self) -> frozenset[int]:
        """Vertices whose tasks take local snapshots, from which their next attempts go on: those of a job
        with a guarantee which are not replayed."""
        if not self.settings.is_guaranteed:
            return frozenset()
        return frozenset(range(len(self.vertices))) - self.replayed()

    def retained_edges(self) -> frozenset[int]:
        """Edges whose producers retain what they have sent until snapshots of the consumers cover it."""
        vertices = self.snapshotted()
        return frozenset(number for number, edge in enumerate(self.edges) if edge.source in vertices)

    def same_rows(self, *, of_one_split: bool = False) -> frozenset[int]:
        """Vertices that take snapshots and make the same rows in the same order in each attempt, wherever it
        begins: sources that can be read again, and what gets all rows by one channel of such a vertex, where
        the steps go by the order of rows alone. All others begin a new version, as does what a function deals
        out (``partition``), which may do that by chance.

        Args:
            of_one_split: also those that do so if each subtask of a source reads one split at most, of which
                the plan knows nothing.
        """
        vertices, others = self.vertices, self.snapshotted()
        others -= {edge.source for edge in self.edges if edge.partitioner == "custom"}
        others = frozenset(number for number in others if vertices[number].by_order)
        found = frozenset(
            number
            for number in others
            if (vertex := vertices[number]).is_source
            and vertex.replayable
            and not vertex.stream
            and (of_one_split or not vertex.in_turn)
        )
        while more := {number for number in others - found if self._gets_all_from(number, found)}:
            found |= more
        return found

    def _gets_all_from(self, vertex: int, others: frozenset[int]) -> bool:
        """Whether all rows that a subtask of it gets come by one channel, of one of the ``others``."""
        inputs, subtasks = self.inputs_of(vertex), range(self.vertices[vertex].parallelism)
        return [self.edges[edge].source in others for edge in inputs] == [True] and all(
            len(self.producers_of(inputs[0], index)) == 1 for index in subtasks
        )

    def unrepeatable(self) -> frozenset[int]:
        """Vertices of which something is stored by a blocking edge that cannot be made again once it is lost,
        since an external client wrote it, or a source cannot read it again."""
        blocking, again = [edge for edge in self.edges if edge.kind == "blocking"], self.replayed()
        if self.settings.restart_strategy == "none" or not blocking:
            return frozenset()
        return frozenset(
            vertex
            for joined in self.joined()
            if joined.isdisjoint(again) and any(edge.source in joined for edge in blocking)
            for vertex in joined
        )

    def joined(self) -> list[set[int]]:
        """The vertices that run at one time, since edges join them whose partitions nobody keeps."""
        kept, parts = self.kept_edges(), [{number} for number in range(len(self.vertices))]
        for number, edge in enumerate(self.edges):
            if number not in kept:
                ends = [part for part in parts if edge.source in part or edge.target in part]
                parts = [part for part in parts if part not in ends] + [set[int]().union(*ends)]
        return parts

    def is_read_first(self, edge: int) -> bool:
        """Whether the consumers take nothing of other inputs before they have all of this one: a side that is
        broadcast."""
        return self.edges[edge].partitioner == "broadcast" and self.edges[edge].input > 0

    def parts_alike(self, edge: int) -> bool:
        """Whether the same rows go to the same consumers when a producer runs again."""
        producers = range(self.vertices[self.edges[edge].source].parallelism)
        alone = all(len(self.consumers_of(edge, producer)) == 1 for producer in producers)
        return alone or self.edges[edge].partitioner in ("hash", "broadcast")

    @property
    def slots_needed(self) -> int:
        """For all vertices at once."""
        return self.slots_of(range(len(self.vertices)))

    def first_slots(self) -> list[int]:
        """By vertex, the number of the slot of its subtask 0; the others follow. Each slot group has slots of
        its own."""
        firsts: dict[str, int] = {}
        taken = 0
        for group, width in self._widths(range(len(self.vertices))).items():
            firsts[group], taken = taken, taken + width
        return [firsts[vertex.slot_group] for vertex in self.vertices]

    def in_slot(self, slot: int) -> list[tuple[int, int]]:
        """Vertex and index of the subtasks that run there."""
        return [
            (number, slot - first)
            for number, first in enumerate(self.first_slots())
            if first <= slot < first + self.vertices[number].parallelism
        ]

    def slots_of(self, vertices: Iterable[int]) -> int:
        """How many slots these need at once: the greatest parallelism of each slot group, together."""
        return sum(self._widths(vertices).values())

    def _widths(self, vertices: Iterable[int]) -> dict[str, int]:
        """The greatest parallelism of each slot group."""
        widths: dict[str, int] = {}
        for number in vertices:
            vertex = self.vertices[number]
            widths[vertex.slot_group] = max(widths.get(vertex.slot_group, 0), vertex.parallelism)
        return widths

    def producers_of(self, edge: int, consumer: int) -> range:
        """Subtask indices of the producers that feed ``consumer`` over ``edge``."""
        e = self.edges[edge]
        m, n = self.vertices[e.source].parallelism, self.vertices[e.target].parallelism
        if not e.pointwise:
            return range(m)
        if m >= n:
            return range(_ceil_div(consumer * m, n), _ceil_div((consumer + 1) * m, n))
        return range(consumer * m // n, consumer * m // n + 1)

    def consumers_of(self, edge: int, producer: int) -> range:
        """Subtask indices of the consumers that ``producer`` feeds over ``edge``."""
        e = self.edges[edge]
        m, n = self.vertices[e.source].parallelism, self.vertices[e.target].parallelism
        if not e.pointwise:
            return range(n)
        if m >= n:
            return range(producer * n // m, producer * n // m + 1)
        return range(_ceil_div(producer * n, m), _ceil_div((producer + 1) * n, m))

    def neighbours(self, vertex: int, index: int) -> list[tuple[int, range]]:
        """The subtasks that exchange rows with that one: vertices, and indices of each."""
        return [*self._feeding(vertex, index), *self._fed(vertex, index)]

    def producers(self, vertex: int, index: int) -> list[tuple[int, int]]:
        """Vertex and index of the subtasks that write what that one reads."""
        return [(source, each) for source, indices in self._feeding(vertex, index) for each in indices]

    def consumers(self, vertex: int, index: int) -> list[tuple[int, int]]:
        """Vertex and index of the subtasks that read what that one writes."""
        return [(target, each) for target, indices in self._fed(vertex, index) for each in indices]

    def _feeding(self, vertex: int, index: int) -> list[tuple[int, range]]:
        return [(self.edges[e].source, self.producers_of(e, index)) for e in self.inputs_of(vertex)]

    def _fed(self, vertex: int, index: int) -> list[tuple[int, range]]:
        return [(self.edges[e].target, self.consumers_of(e, index)) for e in self.outputs_of(vertex)]

    def inputs_of(self, vertex: int) -> list[int]:
        """Indices of the edges that end in ``vertex``."""
        return [i for i, edge in enumerate(self.edges) if edge.target == vertex]

    def outputs_of(self, vertex: int) -> list[int]:
        """Indices of the edges that begin in ``vertex``."""
        return [i for i, edge in enumerate(self.edges) if edge.source == vertex]

    def exchange_name(self, number: int) -> str:
        """The names of the vertices at the ends of an edge."""
        edge = self.edges[number]
        return f"{self.vertices[edge.source].name} => {self.vertices[edge.target].name}"

    def to_bytes(self) -> bytes:
        """Text that is no Unicode is escaped, as in messages."""
        fields = self.model_dump(mode="python")
        packed: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="backslashreplace")
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> JobGraph:
        """Read a graph back.

        Raises:
            InvalidGraph: the bytes are not a graph, or its parts contradict each other.
        """
        try:
            return cls.model_validate(unpack_bounded(data, limits.MESSAGE_VALUES_MAX // 8))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidGraph(f"job graph cannot be read: {where:.80}: {first['msg']}") from None
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidGraph(f"job graph cannot be read: {error}") from error


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
