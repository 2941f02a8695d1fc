"""Steps that other steps follow in tests of the plan, and the operators that the nodes of a plan become."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa

from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.operators.base import Operator
from minishuffle.plan.kinds import built
from minishuffle.plan.nodes import Node

__all__ = ["HOUR", "MOMENT", "SCHEMA", "last", "planned", "rows", "table", "timed"]

MOMENT = pa.timestamp("us", "UTC")
SCHEMA = pa.schema({"user": pa.string(), "t": MOMENT, "n": pa.int32(), "price": pa.decimal128(6, 2)})
HOUR = timedelta(hours=1)


def table() -> Table:
    return Table.from_arrow(SCHEMA.empty_table())


def rows() -> Stream[Any]:
    return Stream.items([{"user": "a", "t": 1}])


def timed() -> Stream[Any]:
    return rows().event_time("t")


def last(stream: StreamBase) -> Node:
    (node,) = stream.plan.ends
    return node


def planned(node: Node) -> Operator:
    """The operator of a node, whose side outputs have their names as tags."""
    spec = node.step.operator(node, {name: name for name in node.step.sides})
    return built(replace(spec, id=node.id) if node.step.has_state else spec, node.label)
