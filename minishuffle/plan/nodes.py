"""The logical plan: immutable nodes that point at their inputs.

A node is one step that the user wrote, or one that serves the next. What it does is its :class:`Step`, which
knows the schema and event time of its input and of what it gives; a step checks its parameters when it is
made. Unions and exchanges are nodes as well, and no operators: a *feed* is the way of records to a node from
one that runs, seen through those between. (Flink: ``Transformation``, and the virtual nodes of
``StreamGraph``.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from minishuffle.errors import InvalidGraph
from minishuffle.operators.event_time import EventTime
from minishuffle.plan.graph import PartitionKind
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.knownrows import KnownRows

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.operators.chained import OnError

__all__ = [
    "Boundary",
    "Exchange",
    "Feed",
    "Names",
    "Needed",
    "Node",
    "Partitioning",
    "Known",
    "Relation",
    "ObjectSchema",
    "Schema",
    "SourceStep",
    "Step",
    "ends_of",
    "inputs_first",
    "named_step",
    "one_of_each",
    "remade",
    "running",
    "schema_text",
    "with_own_ids",
]

Names: TypeAlias = "frozenset[str] | None"
"""Names of columns; None: all."""
Partitioning: TypeAlias = Literal["hash", "rebalance", "rescale", "forward", "broadcast", "custom"]


# --- records --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ObjectSchema:
    """The schema of Python objects. It is one whatever they are; ``to_table`` asks what else is known.

    ``columns`` are the names that dict rows have; None: the rows may be anything. ``origins`` say where the
    rows may come from, if that is known of all.
    """

    columns: tuple[str, ...] | None = None
    origins: tuple[KnownRows, ...] = ()

    def __str__(self) -> str:
        return "Python objects" if self.columns is None else f"dicts of {', '.join(self.columns)}"


Schema: TypeAlias = "ObjectSchema | pa.Schema"
"""That of a stream, or that of a table."""


def schema_text(schema: Schema, fields_max: int | None = None) -> str:
    """A schema in one line, with so many columns at most."""
    if isinstance(schema, ObjectSchema):
        return str(schema)
    fields = [f"{field.name}: {field.type}" for field in schema]
    left = 0 if fields_max is None else len(fields) - fields_max
    return ", ".join(fields if left <= 0 else [*fields[:fields_max], f"{left} more"])


_ROW_TIME: str = "event_time(...) before key_by"
_COLUMN_TIME: str = "event_time('column') before key_by, and again after map_batches() that leaves it out"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of records when the plan is built: their schema, and where event time stands."""

    schema: Schema
    time: EventTime | None = None

    @property
    def arrow(self) -> pa.Schema:
        """The schema of columns."""
        schema = self.schema
        assert not isinstance(schema, ObjectSchema), "rows have no columns of Arrow"
        return schema

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the columns; None: those of rows are not known."""
        schema = self.schema
        return schema.columns if isinstance(schema, ObjectSchema) else tuple(schema.names)

    @property
    def origins(self) -> tuple[KnownRows, ...]:
        """Where rows may come from; nothing if it is not known, and of columns."""
        return self.schema.origins if isinstance(self.schema, ObjectSchema) else ()

    @property
    def time_column(self) -> str | None:
        """The column in which the event time stands, if it stands in one."""
        return None if self.time is None else self.time.column

    def needed_time(self, what: str) -> EventTime:
        """Where the event time stands.

        Raises:
            InvalidGraph: there is none; says ``what`` needs it.
        """
        if self.time is None:
            hint = _ROW_TIME if isinstance(self.schema, ObjectSchema) else _COLUMN_TIME
            raise InvalidGraph(f"{what}: call {hint}")
        return self.time

    def untimed(self) -> Known:
        """Without event time if it is beside the records."""
        is_beside = self.time is not None and self.time.is_beside
        return Known(self.schema) if is_beside else self

    def held(self) -> Known:
        """With the event time beside the records, if there is any."""
        return self if self.time is None else Known(self.schema, self.time.beside())


@dataclass(frozen=True, slots=True)
class Needed:
    """What is read of records: these columns, and the event times beside them or not."""

    columns: Names = None
    times: bool = True

    def also(self, *names: str | None) -> Needed:
        """With these columns; None stands for no column."""
        if self.columns is None:
            return self
        return Needed(self.columns.union(name for name in names if name is not None), self.times)

    def only(self, *names: str | None) -> Needed:
        """These columns alone, whatever was read."""
        return Needed(frozenset(name for name in names if name is not None), self.times)

    def all_columns(self) -> Needed:
        """All columns."""
        return Needed(None, self.times)

    def timed(self, times: bool) -> Needed:
        """With the event times beside the records, or without."""
        return Needed(self.columns, times)


# --- steps ----------------------------------------------------------------------------------------


class Step:
    """What a node does. Subclasses are frozen dataclasses: what the user gave, and what is known of the
    records that come in (``given``).

    They check their fields when they are made, and build no operator: :meth:`operator` says which one runs.
    """

    runs: ClassVar[bool] = True
    """Is an operator; else it says where records come from or go to, and is a part of the feeds behind it."""
    follows: ClassVar[bool] = False
    """Runs where its only input runs, unless the user says otherwise."""
    is_auxiliary: ClassVar[bool] = False
    """Serves the step after it (``key_by``) and is left out of names."""
    is_sink: ClassVar[bool] = False
    joins_input: ClassVar[bool] = False
    """Stands in the chain of its input wherever it may."""
    has_state: ClassVar[bool] = False
    first_input: ClassVar[int | None] = None
    """The number of the input that is read to its end before any other is; None: in turn."""

    @property
    def label(self) -> str:
        """The name of a node with this step, unless the user gives one."""
        raise NotImplementedError

    @property
    def gives(self) -> Known:
        """The records that it gives."""
        raise NotImplementedError

    @property
    def on_error(self) -> OnError:
        """What becomes of a record for which a function of the user raises."""
        return "fail"

    @property
    def sides(self) -> Mapping[str, Known]:
        """Records that it gives beside them, by the name of the side output."""
        return {}

    @property
    def by_order(self) -> bool:
        """What it gives depends on the rows that come to it, and their order: not on how they are cut into
        batches, on watermarks or the clock. Of a source: on where it begins, if it reads one split."""
        return False

    @property
    def must_be_read(self) -> frozenset[str]:
        """Side outputs whose records are nowhere else and in no count of what was dropped."""
        return frozenset()

    def needs(self, wanted: Needed, input: int) -> Needed:
        """What it reads of an input, if ``wanted`` is read of what it gives. By default all columns and no
        event times."""
        return Needed(None, times=False)

    def route(self, beyond: Exchange | None) -> Exchange | None:
        """How records find their subtask on their way through this step and ``beyond``; asked of steps that
        do not run."""
        return beyond

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        """The operator that runs for a node with this step; asked of those that run.

        Args:
            tags: of its side outputs, by name.
        """
        raise NotImplementedError


# --- nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """How records find their subtask; the fields are those of ``operators.base.Output``.

    Without a partitioner only the kind of the edge is said, and the next step chooses how.
    """

    partitioner: Partitioning | None
    keys: tuple[str, ...] | None = None
    choose: Callable[[Any, int], int] | None = None
    kind: PartitionKind | None = None
    """None: ``pipelined_bounded``."""

    @property
    def is_chosen(self) -> bool:
        """Whether it is said who gets which record."""
        return self.partitioner is not None

    def and_then(self, other: Exchange | None) -> Exchange:
        """This one and another on one way: one chooses subtasks, one says the kind of the edge."""
        if other is None:
            return self
        chosen = self if self.is_chosen else other
        return replace(chosen, kind=self.kind if other.kind is None else other.kind)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where records come from another program, or are kept for one to read.

    ``name`` is the stream's or the sink's, ``schema_message`` an Arrow schema as an IPC message.
    """

    name: str
    schema_message: bytes
    bounded: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A step in its place. A source has no inputs, every other node has some."""

    step: Step
    inputs: tuple[Relation, ...] = ()
    label: str = ""
    id: str = ""
    """That of its state: its name, or a digest of its path from the sources, of the steps that run. Rewrites
    keep it."""
    parallelism: int | None = None
    """None: the job's, or with ``follows`` the input's; known once a job is planned."""
    slot_group: str | None = None
    """None: that of its inputs, if they are of one; known once a job is planned."""
    changed: Node | None = None
    """The same step before it was named or made parallel: where both are read, it still is one."""
    needed: Needed = field(default=Needed(), kw_only=True)
    """What is read of what it gives; found when a job is planned, as are the next two."""
    reads: tuple[Needed, ...] = field(default=(), kw_only=True)
    """What is read of each feed; nothing if that was not found."""
    is_chained: bool = field(default=False, kw_only=True)
    """Runs in the thread of its input."""

    @classmethod
    def of(cls, step: Step, *inputs: Relation) -> Node:
        """With the name of the step and the id of its path.

        Raises:
            InvalidGraph: an input ends in a sink.
        """
        for each in inputs:
            each.check_open(step.label)
        if not step.runs:
            return cls(step, inputs, step.label)
        feeds = (feed for each in inputs for feed in each.feeds)
        path = [step.label, *(f"{feed.node.id} {feed.side} {feed.input}" for feed in feeds)]
        digest = sha256("\n".join(path).encode(errors="surrogatepass")).hexdigest()
        return cls(step, inputs, step.label, f"{step.label}-{digest[:12]}")

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """The ways by which records come to it, from nodes that run."""
        feeds = [feed for each in self.inputs for feed in each.feeds]
        if not self.reads:
            return tuple(feeds)
        return tuple(replace(feed, needed=needed) for feed, needed in zip(feeds, self.reads, strict=True))

    @property
    def bounded(self) -> bool:
        """Whether its data come to an end: those of every source before it do."""
        return all(node.step.bounded for node in inputs_first([self]) if isinstance(node.step, SourceStep))

    @property
    def is_source(self) -> bool:
        return not self.inputs

    @property
    def is_auxiliary(self) -> bool:
        return self.step.is_auxiliary

    @property
    def is_sink(self) -> bool:
        return self.step.is_sink

    @property
    def takes(self) -> dict[int, Names]:
        """The columns that come, by the number of the input."""
        return {feed.input: feed.columns for feed in self.feeds}

    def named(self, label: str) -> Node:
        """The same under another name, which errors and the job's tables show."""
        return replace(self, label=label, id=label)


class SourceStep(Step):
    """Where records come from."""

    @property
    def bounded(self) -> bool:
        """Whether they come to an end."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """One way of records to a node from one that runs. Without an exchange they stay where they are, if they
    can.

    ``input`` is the number under which the node's operator takes them. With ``side``, it is that side
    output of ``node`` that is read, not its records.
    """

    node: Node
    exchange: Exchange | None = None
    input: int = 0
    side: str | None = None
    needed: Needed = Needed()
    """What is read of the records; found when a job is planned."""

    @property
    def columns(self) -> Names:
        """Those that are read."""
        return self.needed.columns

    @property
    def gives(self) -> Known:
        """The records that come."""
        return Relation(self.node, self.side).gives

    @property
    def is_chosen(self) -> bool:
        """Whether it is said who gets which record."""
        return self.exchange is not None and self.exchange.is_chosen

    @property
    def stays(self) -> bool:
        """Whether records stay in their subtask, if as many run behind it."""
        return self.exchange is None or self.exchange.partitioner in (None, "forward")

    @property
    def kind(self) -> PartitionKind | None:
        """The kind of the edge, where one is said."""
        return None if self.exchange is None else self.exchange.kind


# --- relations ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """The records that a node gives, or puts aside under the name ``side``: what a stream or a table stands
    for, and what a node takes.

    ``input`` is the number under which the operator of the node behind takes them.
    """

    node: Node
    side: str | None = None
    input: int = 0

    @classmethod
    def of(cls, step: Step, *inputs: Relation) -> Relation:
        """What a step gives of these inputs.

        Raises:
            InvalidGraph: an input ends in a sink.
        """
        return cls(Node.of(step, *inputs))

    @property
    def gives(self) -> Known:
        """The records."""
        step = self.node.step
        return step.gives if self.side is None else step.sides[self.side]

    @property
    def feeds(self) -> list[Feed]:
        """The ways of the records from nodes that run: one, or several after a union."""
        found: list[Feed] = []
        stack: list[tuple[Relation, Exchange | None]] = [(self, None)]
        while stack:
            relation, beyond = stack.pop()
            node = relation.node
            if node.step.runs:
                found.append(Feed(node, beyond, self.input, relation.side))
            else:
                route = node.step.route(beyond)
                stack.extend((each, route) for each in reversed(node.inputs))
        return found

    @property
    def ends(self) -> tuple[Node, ...]:
        """The nodes that run and give the records: one, or several after a union."""
        return tuple(dict.fromkeys(feed.node for feed in self.feeds))

    @property
    def bounded(self) -> bool:
        """Whether the records come to an end."""
        return self.node.bounded

    def at(self, input: int) -> Relation:
        """The same, taken under that number."""
        return replace(self, input=input)

    def then(self, step: Step, label: str = "") -> Relation:
        """What a step gives of the records, under another name if there is a ``label``.

        Raises:
            InvalidGraph: the records end in a sink.
        """
        self.check_open(label or step.label)
        node = Node.of(step, self)
        return Relation(replace(node, label=label) if label else node)

    def check_open(self, method: str) -> None:
        """Raises InvalidGraph if a sink would have to give records to ``method``."""
        if self.node.is_sink:
            raise InvalidGraph(
                f"{method} cannot follow the sink {self.node.label!r}: call it on the stream before the sink "
                "(a stream may be used more than once)"
            )

    def put_aside(self, name: str) -> Relation | None:
        """What the step before puts aside under that name; None: it is no step that does."""
        if self.side is not None or name not in self.node.step.sides:
            return None
        return replace(self, side=name)

    def with_last_step(self, method: str, change: Callable[[Node], Node]) -> Relation:
        """The same records with the last step changed that the user wrote: under those that serve the next.

        Raises:
            InvalidGraph: there is none, as after a union, an exchange or a side output.
        """
        node = self.node
        if not node.step.runs:
            raise InvalidGraph(f"{method}() must directly follow the operator that it is about")
        if self.side is not None:
            raise InvalidGraph(
                f"{method}() cannot follow .late, .panes, .errors or .side(...), which are no operators: "
                "call it before, or after the next one"
            )
        if node.is_auxiliary and len(node.inputs) == 1 and node.inputs[0].node.step.runs:
            before = node.inputs[0].with_last_step(method, change)
            return replace(self, node=replace(node, inputs=(before,), changed=node))
        return replace(self, node=replace(change(node), changed=node))


# --- graphs of nodes ------------------------------------------------------------------------------


def inputs_first(ends: Sequence[Node]) -> Iterator[Node]:
    """Every node that leads to ``ends``, once, each after its inputs."""
    seen: set[Node] = set()
    stack = [(node, False) for node in reversed(ends)]
    while stack:
        node, is_ready = stack.pop()
        if is_ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((each.node, False) for each in reversed(node.inputs))


def running(nodes: Iterable[Node]) -> list[Node]:
    """Those that are operators."""
    return [node for node in nodes if node.step.runs]


def ends_of(nodes: Sequence[Node]) -> list[Node]:
    """Those that no other reads."""
    read = {each.node for node in nodes for each in node.inputs}
    return [node for node in nodes if node not in read]


def remade(nodes: Sequence[Node], change: Callable[[Node, Node], Node]) -> list[Node]:
    """The nodes, inputs first, each as ``change(node, made)`` gives it: ``made`` is the node with inputs that
    were made so. Those that nobody reads any more are left out."""
    found: dict[Node, Node] = {}
    for node in nodes:
        inputs = tuple(replace(each, node=found[each.node]) for each in node.inputs)
        found[node] = change(node, replace(node, inputs=inputs))
    return list(inputs_first([found[end] for end in ends_of(nodes)]))


def named_step(node: Node) -> str:
    """The name of a step, or for one that only serves the next that of the step before it."""
    while node.is_auxiliary and len(feeds := node.feeds) == 1:
        node = feeds[0].node
    return node.label


def one_of_each(ends: Sequence[Node]) -> list[Node]:
    """The ends with every step once: where a side output is read of a step that was named or made parallel
    afterwards, both are the changed one.

    Raises:
        InvalidGraph: it was changed in two ways.
    """
    nodes = list(inputs_first(ends))
    aside = {_origin(each.node) for node in nodes for each in node.inputs if each.side is not None}
    versions: dict[Node, Node] = {}
    for node in nodes:
        origin = _origin(node)
        if origin in aside:
            before = versions.setdefault(origin, node)
            if before in _history(node):
                versions[origin] = node
            elif node not in _history(before):
                raise InvalidGraph(
                    f"the step {origin.label!r} is changed in two ways, {before.label!r} and {node.label!r}, "
                    "and a side output of it is read: call name() and parallel() once, and use what they give"
                )
    if not versions:
        return list(ends)
    made: dict[Node, Node] = {}

    def of_latest(node: Node) -> Node:
        node = versions.get(_origin(node), node)
        if node not in made:
            inputs = tuple(replace(each, node=of_latest(each.node)) for each in node.inputs)
            made[node] = replace(node, inputs=inputs)
        return made[node]

    return list(map(of_latest, ends))


def with_own_ids(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, inputs first, with ids that no two have: those of one way from the sources, or of one name,
    are numbered in their order."""
    seen: Counter[str] = Counter()

    def numbered(node: Node, made: Node) -> Node:
        seen[node.id] += 1
        return made if seen[node.id] == 1 else replace(made, id=f"{node.id}.{seen[node.id]}")

    return remade(nodes, numbered)


def _history(node: Node) -> list[Node]:
    """The step and the steps that it took the place of, the latest first."""
    return [node] if node.changed is None else [node, *_history(node.changed)]


def _origin(node: Node) -> Node:
    return _history(node)[-1]
