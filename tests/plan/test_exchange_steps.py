"""Unions and exchanges as steps: what they give, what they refuse, and the ways that they are parts of."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.operators.event_time import EventTime
from minishuffle.plan.exchange_steps import ExchangeStep, UnionStep, fed, hashed
from minishuffle.plan.nodes import Exchange, Known, Needed, Relation
from minishuffle.plan.planner import plan_job

SALES = Table.from_arrow(pa.table({"user": ["ann"], "at": [1]}))


def ways(relation: Relation) -> list[tuple[str, Exchange | None]]:
    return [(feed.node.label, feed.exchange) for feed in relation.feeds]


def test_each_method_is_one_node_and_what_runs_is_fed_through_them() -> None:
    one, other = Stream.items([1]), Stream.items([2]).map(abs).rebalance()
    joined = one.union(other).exchange("pipelined")
    assert [type(node.step).__name__ for node in plan_job(joined.collect()).nodes] == [
        "ScanStep",
        "ScanStep",
        "MapStep",
        "ExchangeStep",
        "UnionStep",
        "ExchangeStep",
        "SinkStep",
    ]
    kind = Exchange(None, kind="pipelined")
    assert ways(joined.plan) == [("items", kind), ("map", Exchange("rebalance", kind="pipelined"))]


def test_a_union_gives_what_all_give() -> None:
    time = EventTime(column="at")
    known, other = Known(SALES.plan.gives.schema, time), Known(SALES.plan.gives.schema)
    assert UnionStep((known, known)).gives.time == time
    assert UnionStep((known, other)).gives.time is None
    assert UnionStep((known, other)).needs(Needed(frozenset({"user"})), 0).columns == {"user"}


@pytest.mark.parametrize(
    ("exchange", "before", "problem"),
    [
        (Exchange("rebalance"), Exchange("rescale"), r"rebalance\(\) follows another choice of subtasks"),
        (Exchange("custom", choose=max), Exchange("forward"), r"partition\(\) follows another choice"),
        (Exchange("hash", keys=("user",)), Exchange("rescale"), "key_by itself chooses the subtasks"),
        (
            Exchange(None, kind="blocking"),
            Exchange(None, kind="pipelined"),
            r"exchange\('blocking'\) follows",
        ),
    ],
)
def test_an_exchange_refuses_what_is_said_already(exchange: Any, before: Any, problem: str) -> None:
    with pytest.raises(InvalidGraph, match=problem):
        ExchangeStep(SALES.plan.gives, exchange, (Exchange(None), before))


@pytest.mark.parametrize(
    ("exchange", "problem"),
    [
        (Exchange(None, kind="stored"), "exchange is 'stored': write one of pipelined, pipelined_bounded, b"),  # type: ignore[arg-type]
        (Exchange("custom", choose=3), "partition takes a function, not"),  # type: ignore[arg-type]
    ],
)
def test_an_exchange_checks_what_it_is_made_of(exchange: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        ExchangeStep(SALES.plan.gives, exchange)


def test_a_choice_of_subtasks_and_a_kind_go_together_in_either_order() -> None:
    both = Exchange("rebalance", kind="blocking")
    assert ways(SALES.rebalance().exchange("blocking").plan) == [("from_arrow", both)]
    assert ways(SALES.exchange("blocking").rebalance().plan) == [("from_arrow", both)]
    keyed = hashed(SALES.exchange("blocking").plan, ("user",))
    assert ways(keyed) == [("from_arrow", Exchange("hash", ("user",), kind="blocking"))]
    assert keyed.node.step.needs(Needed(frozenset({"at"})), 0).columns == {"at", "user"}


def test_parts_of_one_exchange_stay_behind_one() -> None:
    shuffled, rows = Exchange("rebalance"), SALES.plan
    assert isinstance(fed([(rows, shuffled), (rows, shuffled)]).node.step, ExchangeStep)
    assert isinstance(fed([(rows, shuffled), (rows, None)]).node.step, UnionStep)
    assert fed([(rows, None)]) is rows


@pytest.mark.parametrize("call", [lambda end: end.union(SALES), lambda end: SALES.union(end)])
def test_a_union_of_a_sink_is_refused(call: Any) -> None:
    with pytest.raises(InvalidGraph, match="union cannot follow the sink 'to_count'"):
        call(SALES.to_count())
