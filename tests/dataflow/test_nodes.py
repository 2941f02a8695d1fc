"""The steps of a stream: their order, and depth that no recursion has to follow."""

from __future__ import annotations

from typing import Any

from minishuffle.dataflow.nodes import inputs_first
from minishuffle.dataflow.stream import Stream


def rows() -> Stream[Any]:
    return Stream.items([1, 2, 3])


def test_steps_are_listed_inputs_first_and_once() -> None:
    stream = rows().map(str)
    joined = stream.filter(bool).name("f").union(stream, stream.flat_map(list)).collect()
    assert [node.label for node in inputs_first(joined.ends)] == ["items", "map", "f", "flat_map", "collect"]


def test_a_long_chain_is_no_deep_recursion() -> None:
    stream = rows()
    for _ in range(3000):
        stream = stream.map(abs)
    assert len(list(inputs_first(stream.ends))) == 3001
    assert stream.ends[0].bounded
