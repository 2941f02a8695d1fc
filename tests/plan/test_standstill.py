"""Which exchanges are blocking beside those that the job says, and which steps would wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.plan.graph import JobGraph
from minishuffle.plan.nodes import inputs_first
from minishuffle.plan.planner import compile_job
from minishuffle.plan.standstill import blocking_feeds, check_waits

Rows = Stream[Any]


def items(name: str = "items") -> Rows:
    return Stream.items([{"user": "a"}]).name(name)


def endless(name: str = "ticks") -> Rows:
    return Stream.generate(lambda start, count: [{"user": "a"}] * count, rate=1).name(name)


def kinds(stream: Any, parallelism: int = 2) -> list[str]:
    """``source>target partitioner kind`` of each edge, with the edge for whose sake it is so."""
    graph: JobGraph = compile_job(stream, parallelism=parallelism)
    names = [vertex.name.partition(" ")[0] for vertex in graph.vertices]
    return [
        f"{names[edge.source]}>{names[edge.target]} {edge.partitioner} {edge.kind}"
        + (f" for {edge.because_of}" if edge.because_of is not None else "")
        for edge in graph.edges
    ]


# --- what the user says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (lambda s: s.map(dict), []),
        (lambda s: s.exchange("blocking").map(dict), ["items>map forward blocking"]),
        (lambda s: s.exchange("pipelined").map(dict), []),
        (
            lambda s: s.exchange("pipelined_bounded").rebalance(),
            ["items>collect rebalance pipelined_bounded"],
        ),
        (lambda s: s.exchange("blocking").rebalance(), ["items>collect rebalance blocking"]),
        (lambda s: s.rescale().exchange("pipelined"), ["items>collect rescale pipelined"]),
        (lambda s: s.forward().exchange("blocking").map(dict), ["items>map forward blocking"]),
        (lambda s: s.exchange("blocking").broadcast(), ["items>collect broadcast blocking"]),
        (lambda s: s.exchange("blocking").key_by("user").count(), ["items>count hash blocking"]),
        (lambda s: s.exchange("blocking").key_by(lambda r: r["user"]).count(), ["items>count hash blocking"]),
        (
            lambda s: s.exchange("blocking").partition(lambda row, n: 0),
            ["items>collect custom blocking"],
        ),
        (
            lambda s: s.map(dict).parallel(1).exchange("blocking").map(dict),
            ["items>map rebalance pipelined_bounded", "map>map rebalance blocking"],
        ),
        (
            lambda s: s.rebalance().exchange("blocking").key_by("user").count(),
            ["items>key_by rebalance blocking", "key_by>count hash pipelined_bounded"],
        ),
        (
            lambda s: s.exchange("blocking").union(items("others")),
            ["items>collect forward blocking", "others>collect forward pipelined_bounded"],
        ),
    ],
)
def test_an_exchange_is_of_the_kind_that_stands_before_it(
    stream: Callable[[Rows], Rows], expected: list[str]
) -> None:
    assert kinds(stream(items()).collect()) == expected


def test_tables_have_the_same_method() -> None:
    table = Table.from_arrow(pa.table({"user": ["a"], "n": [1]})).exchange("blocking")
    assert kinds(table.key_by("user").count().to_count()) == ["from_arrow>count hash blocking"]
    assert kinds(table.to_rows().to_count()) == ["from_arrow>to_count forward blocking"]
    small = Table.from_arrow(pa.table({"user": ["a"], "m": [1]})).exchange("blocking")
    joined = Table.from_arrow(pa.table({"user": ["a"]})).broadcast_join(small, "user")
    assert kinds(joined.to_count())[1:] == ["from_arrow>broadcast_join broadcast blocking"]


def test_a_kind_that_is_none_is_refused() -> None:
    wrong: Any = ["Blocking", "", None, 3]
    for kind in wrong:
        with pytest.raises(UsageError, match="write one of pipelined, pipelined_bounded, blocking"):
            items().exchange(kind)
    with pytest.raises(InvalidGraph, match="follows another exchange"):
        items().exchange("pipelined").rebalance().exchange("blocking")
    with pytest.raises(InvalidGraph, match=r"rebalance\(\) follows another choice of subtasks"):
        items().rescale().exchange("blocking").rebalance()
    with pytest.raises(InvalidGraph, match=r"exchange cannot follow the sink"):
        items().to_count().exchange("blocking")
    with pytest.raises(InvalidGraph, match=r"name\(\) must directly follow the operator"):
        items().exchange("blocking").name("late")


# --- what follows -----------------------------------------------------------------------------------


def diamond(source: Rows) -> Rows:
    return source.map(dict).exchange("blocking").union(source.filter(bool)).collect()


def short_cut(source: Rows) -> Rows:
    """What is stored goes to a step that gives to the one which reads the source itself."""
    return source.union(source.exchange("blocking").map(dict)).collect()


def zigzag() -> Rows:
    """Two ways that cross, each from before one exchange to behind the other."""
    one, other = items("one"), items("other")
    stored, stored_too = one.exchange("blocking").map(dict), other.exchange("blocking").filter(bool)
    return Stream.together(stored_too.union(one).collect("a"), stored.union(other).collect("b"))


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (
            diamond(items()),
            [
                "items>map forward pipelined_bounded",
                "items>filter forward pipelined_bounded",
                "map>collect forward blocking",
                "filter>collect forward blocking for 2",
            ],
        ),
        (
            diamond(items().exchange("blocking").map(dict).name("behind")),
            [
                "items>behind forward blocking",
                "behind>map forward pipelined_bounded",
                "behind>filter forward pipelined_bounded",
                "map>collect forward blocking",
                "filter>collect forward blocking for 3",
            ],
        ),
        (
            short_cut(items()),
            [
                "items>map forward blocking",
                "items>collect forward blocking for 0",
                "map>collect forward pipelined_bounded",
            ],
        ),
        (
            items().exchange("blocking").union(items("others")).collect(),
            ["items>collect forward blocking", "others>collect forward pipelined_bounded"],
        ),
        (
            items().exchange("blocking").union(endless()).collect(),
            ["items>collect forward blocking", "ticks>collect forward pipelined_bounded"],
        ),
        (
            items().exchange("blocking").map(dict).union(items("others")).collect(),
            [
                "items>map forward blocking",
                "map>collect forward pipelined_bounded",
                "others>collect forward pipelined_bounded",
            ],
        ),
        (
            zigzag(),
            [
                "other>filter forward blocking",
                "filter>a forward pipelined_bounded",
                "one>a forward pipelined_bounded",
                "one>map forward blocking",
                "map>b forward pipelined_bounded",
                "other>b forward pipelined_bounded",
            ],
        ),
    ],
)
def test_what_joins_both_ends_of_a_blocking_exchange_enters_behind_it_by_another(
    stream: Rows, expected: list[str]
) -> None:
    assert sorted(kinds(stream)) == sorted(expected)
    nodes = list(inputs_first(stream.plan.ends))
    again = blocking_feeds(nodes)
    assert all(cause is None or again[cause] is None for cause in again.values())


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (
            lambda: endless().exchange("blocking").collect(),
            "from 'ticks' to 'collect' would never be complete: 'ticks' has no end",
        ),
        (
            lambda: endless().map(dict).key_by("user").count(emit="each").exchange("blocking").collect(),
            "from 'count' to 'collect' would never be complete: 'ticks' has no end",
        ),
        (
            lambda: items().union(endless()).exchange("blocking").key_by("user").count(emit="each").collect(),
            "'ticks' has no end",
        ),
        (
            lambda: (
                lambda source: (
                    source.exchange("blocking")
                    .map(dict)
                    .union(source.union(endless()).map(dict).name("both"))
                    .collect()
                )
            )(items()),
            "from 'items' to 'map' needs the exchange from 'both' to 'collect' to be blocking too, which "
            "joins what is before and behind, and 'ticks' before it has no end",
        ),
    ],
)
def test_what_has_no_end_is_not_stored(stream: Callable[[], Rows], text: str) -> None:
    with pytest.raises(InvalidGraph) as raised:
        compile_job(stream())
    assert text in str(raised.value)
    assert str(raised.value).endswith(("or leave the exchange out", "or leave exchange('blocking') out"))


def test_what_is_stored_waits_for_nobody_but_its_reader_may() -> None:
    source = items()
    with pytest.raises(
        InvalidGraph, match=r"would wait for itself: .*, or write exchange\('blocking'\) right"
    ):
        source.filter(bool).broadcast_join(source.map(dict), "user")
    joined = source.filter(bool).exchange("blocking").broadcast_join(source.map(dict), "user").collect()
    assert "filter>broadcast_join forward blocking" in kinds(joined)
    small = source.filter(bool).broadcast_join(source.map(dict).exchange("blocking"), "user").collect()
    assert [each for each in kinds(small) if " for " in each] == [
        "filter>broadcast_join forward blocking for 3"
    ], "it follows by itself"
    middle = items().exchange("blocking").map(dict)
    with pytest.raises(InvalidGraph, match="both come from 'map', which would wait for itself"):
        middle.filter(bool).broadcast_join(middle.flat_map(lambda row: [row]), "user")
    check_waits(list(inputs_first(joined.plan.ends)))
