"""The steps of a stream: their order, and depth that no recursion has to follow."""

from __future__ import annotations

from typing import Any

from minishuffle.api.stream import Stream
from minishuffle.plan.nodes import inputs_first
from minishuffle.plan.planner import logical_plan


def rows() -> Stream[Any]:
    return Stream.items([1, 2, 3])


def test_steps_are_listed_inputs_first_and_once() -> None:
    stream = rows().map(str)
    joined = stream.filter(bool).name("f").union(stream, stream.flat_map(list)).collect()
    assert [node.label for node in inputs_first(joined.plan.ends)] == [
        "items",
        "map",
        "f",
        "flat_map",
        "union",
        "collect",
    ]


def test_ids_are_those_of_the_way_from_the_sources_or_names_and_no_two_are_the_same() -> None:
    def ids(end: Stream[Any]) -> list[str]:
        return [node.id for node in logical_plan(end.collect()) if node.step.has_state]

    counted = rows().key_by(abs).count()
    (one,) = ids(counted)
    assert ids(rows().key_by(abs).count().filter(bool).parallel(3)) == [one]
    assert ids(rows().rebalance().filter(bool).key_by(abs).count()) != [one]
    assert ids(counted.name("counts")) == ["counts"]
    assert ids(counted.union(rows().key_by(abs).count())) == [one, f"{one}.2"]


def test_a_long_chain_is_no_deep_recursion() -> None:
    stream = rows()
    for _ in range(3000):
        stream = stream.map(abs)
    assert len(list(inputs_first(stream.plan.ends))) == 3001
    assert stream.plan.ends[0].bounded
