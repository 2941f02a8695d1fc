"""The operators that the nodes of a plan become."""

from __future__ import annotations

from minishuffle.operators.base import Operator
from minishuffle.plan.nodes import Node
from minishuffle.plan.planner import operator_of

__all__ = ["planned"]


def planned(node: Node) -> Operator:
    """The operator of a node, whose side outputs have their names as tags."""
    return operator_of(node, {name: name for name in node.step.sides})
