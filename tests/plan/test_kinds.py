"""Kinds of operators: they get the name of their node, and the tags of its side outputs."""

from __future__ import annotations

from typing import Any

from minishuffle.api.stream import Stream
from minishuffle.operators.row_functions import MapRows
from minishuffle.plan.kinds import OperatorSpec, built
from support.planned import planned


def test_an_operator_has_the_name_of_its_node_and_its_side_outputs() -> None:
    spec = OperatorSpec("map", {"fn": abs, "on_error": "side"}, "3-errors", {"x": "3-x"})
    operator = built(spec, "texts")
    assert isinstance(operator, MapRows)
    assert (operator.name, operator.errors_tag, operator.side_tags) == ("texts", "3-errors", {"x": "3-x"})
    assert MapRows.name == "map"


def test_each_node_gets_an_operator_of_its_own() -> None:
    def counted(row: Any) -> Any:
        return row

    (node,) = Stream.items([1]).key_by(abs).fold(int, max).plan.ends
    assert planned(node) is not planned(node)
    assert planned(node).name == "fold"
