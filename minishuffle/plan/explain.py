"""What a job will do, before anything runs: the logical plan, and the physical one: chains, the exchanges
between them with what is shipped and why, and stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minishuffle.operators.event_time import EventTime
from minishuffle.plan.graph import JobGraph
from minishuffle.plan.guarantee import guarantee_lines
from minishuffle.plan.nodes import (
    Exchange,
    Feed,
    Needed,
    Node,
    ObjectSchema,
    Relation,
    ends_of,
    running,
    schema_text,
)
from minishuffle.plan.planner import JobPlan
from minishuffle.plan.row_steps import KeyRowsStep
from minishuffle.plan.stages import slots_needed, stages_of
from minishuffle.plan.standstill import FeedKey

__all__ = ["plan_lines", "plan_map"]


def plan_map(plan: JobPlan) -> dict[str, Any]:
    """For JSON."""
    graph = plan.graph
    names = [vertex.name for vertex in graph.vertices]
    reasons = _Reasons(plan.nodes)
    return {
        "nodes": list(_node_maps(plan.nodes)),
        "operators": [" -> ".join(vertex.operators) for vertex in graph.vertices],
        "exchanges": [
            {
                "source": names[edge.source],
                "target": names[edge.target],
                "partitioner": edge.partitioner,
                "kind": edge.kind,
                "because_of": edge.because_of,
                "ships": reasons.of_feeds[key],
            }
            for edge, key in zip(graph.edges, plan.shipped, strict=True)
        ],
        "schedule": graph.settings.schedule,
        "start_when": None if graph.settings.schedule == "eager" else graph.settings.starts_when,
        "stages": [
            {"operators": [names[vertex] for vertex in stage.vertices], "after": list(stage.needs)}
            for stage in stages_of(graph)
        ],
        "slots": slots_needed(graph),
        "guarantee": graph.settings.guarantee,
    }


def plan_lines(plan: JobPlan) -> list[str]:
    """For a reader."""
    graph = plan.graph
    lines = ["logical plan:", *(f"  {line}" for line in _node_lines(plan.nodes))]
    if not all(node.is_sink for node in ends_of(plan.nodes)):
        lines.append("  no sink yet: end it with collect() or another one to run it")
    lines += ["", "operators (one line for each thread):"]
    lines += [f"  {' -> '.join(vertex.operators)}" for vertex in graph.vertices]
    if graph.edges:
        reasons = _Reasons(plan.nodes)
        lines += ["", "exchanges:"]
        for number, key in enumerate(plan.shipped):
            lines += [f"  {_exchange(graph, number)}", f"    ships {_shown(reasons.of_feeds[key])}"]
    return [*lines, "", *_schedule(graph), *guarantee_lines(graph)]


# --- the logical plan -----------------------------------------------------------------------------


def _node_maps(nodes: list[Node]) -> Iterator[dict[str, Any]]:
    numbers = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        known = node.step.gives
        exchange = node.step.route(None)
        yield {
            "name": node.label,
            "id": node.id if node.step.has_state else None,
            "inputs": [{"node": numbers[each.node], "side": each.side} for each in node.inputs],
            "exchange": None
            if exchange is None
            else {"partitioner": exchange.partitioner, "keys": exchange.keys, "kind": exchange.kind},
            "schema": None if node.is_sink else _schema_map(known.schema),
            "event_time": None if known.time is None else _time(known.time),
        }


def _schema_map(schema: Any) -> Any:
    if isinstance(schema, ObjectSchema):
        return str(schema)
    return {field.name: str(field.type) for field in schema}


def _node_lines(nodes: list[Node]) -> Iterator[str]:
    numbers = {node: number for number, node in enumerate(nodes, 1)}
    for node, number in numbers.items():
        known = node.step.gives
        inputs = f" of {', '.join(_input(each, numbers) for each in node.inputs)}" if node.inputs else ""
        if (exchange := node.step.route(None)) is not None:  # Records go through it as they are.
            yield f"{number}. exchange{inputs} ({_how(exchange)})"
            continue
        parts = [f"{number}. {node.label}{inputs}"]
        if not node.is_sink:
            parts.append(schema_text(known.schema))
        if known.time is not None:
            parts.append(f"event time {_time(known.time)}")
        if node.step.has_state:
            parts.append(f"id {node.id}")
        yield "; ".join(parts)


def _input(relation: Relation, numbers: dict[Node, int]) -> str:
    side = "" if relation.side is None else f".{relation.side}"
    return f"{numbers[relation.node]}{side}"


def _how(exchange: Exchange) -> str:
    how = " ".join(each for each in (exchange.kind, exchange.partitioner) if each is not None)
    if exchange.partitioner != "hash":
        return how
    return f"{how} by {'the key of each row' if exchange.keys is None else ', '.join(exchange.keys)}"


def _time(time: EventTime) -> str:
    if time.is_beside:
        return "beside the records"
    shift = f"{time.shift:+} µs" if time.shift else ""
    return f"in column {time.column}{shift}" if time.column is not None else "by a function of the row"


# --- the physical plan ----------------------------------------------------------------------------


class _Reasons:
    """Which columns come to each input of a node, and which step reads each: the first one behind it."""

    def __init__(self, nodes: list[Node]) -> None:
        self.of_feeds: dict[FeedKey, dict[str, Any]] = {}
        self._of_nodes: dict[Node, dict[str, str]] = {}
        for node in reversed(running(nodes)):
            for number, feed in enumerate(node.feeds):
                self._note(node, number, feed)

    def _note(self, node: Node, number: int, feed: Feed) -> None:
        own = node.step.needs(Needed(frozenset(), times=False), feed.input)
        behind = self._of_nodes.get(node, {})
        keys = (feed.exchange and feed.exchange.keys) or ()
        columns: dict[str, str] | None = None
        if feed.columns is not None:
            columns = {}
            for name in sorted(feed.columns):
                reads = node.label if name in (own.columns or ()) else behind.get(name, node.label)
                columns[name] = f"key of {node.label}" if name in keys else reads
            self._of_nodes.setdefault(feed.node, {}).update(columns)
        step = feed.node.step
        self.of_feeds[node, number] = {
            "columns": columns,
            "keys_alone": isinstance(step, KeyRowsStep) and step.alone,
            "whole_for": None if columns is not None else self._reader(node, own),
            "event_times": feed.needed.times,
        }

    def _reader(self, node: Node, own: Needed) -> str:
        """Who reads all columns of what comes to a node."""
        return node.label if own.columns is None else f"what follows {node.label}"


def _shown(ships: dict[str, Any]) -> str:
    columns = ships["columns"]
    if ships["keys_alone"]:
        text = f"the keys alone ({ships['whole_for']})"
    elif columns is None:
        text = f"all of each record ({ships['whole_for']})"
    else:
        text = ", ".join(f"{name} ({reason})" for name, reason in columns.items())
    return f"{text}, with event times" if ships["event_times"] else text


def _exchange(graph: JobGraph, number: int) -> str:
    edge = graph.edges[number]
    text = f"{graph.exchange_name(number)}: {edge.partitioner}, {edge.kind}"
    if edge.because_of is not None:
        text += f" (since it joins both ends of {graph.exchange_name(edge.because_of)}, which is blocking)"
    return text


def _schedule(graph: JobGraph) -> list[str]:
    settings, slots = graph.settings, slots_needed(graph)
    noun = "slot" if slots == 1 else "slots"
    if settings.schedule == "eager":
        return [f"schedule eager: all at once, {slots} {noun}"]
    if settings.schedule == "first_output":
        return [
            f"schedule first_output: each when {settings.starts_when} of its inputs have rows, {slots} {noun}"
        ]
    if all(edge.kind != "blocking" for edge in graph.edges):
        return [f"schedule stages is eager here, as no exchange is blocking: all at once, {slots} {noun}"]
    lines = [
        f"schedule stages: each when {settings.starts_when} of its blocking inputs are complete, "
        f"{slots} {noun}"
    ]
    for number, stage in enumerate(stages_of(graph)):
        after = f", after {', '.join(str(each + 1) for each in stage.needs)}" if stage.needs else ""
        names = "; ".join(graph.vertices[vertex].name for vertex in stage.vertices)
        lines.append(f"  {number + 1}: {names}{after}")
    return lines
