"""What streams and tables share: names and numbers of subtasks, side outputs, who gets which record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.operators.event_time import EventTime
from minishuffle.plan.graph import PartitionKind
from minishuffle.plan.nodes import Exchange, inputs_first
from support.planned import HOUR, SCHEMA, last, planned, rows, table, timed


def operators(stream: StreamBase) -> list[str]:
    return [planned(node).name for node in inputs_first(stream.plan.ends) if not node.is_source]


# --- the operator before ----------------------------------------------------------------------------


def test_methods_leave_the_stream_as_it_was() -> None:
    stream = rows().map(str)
    before = last(stream)
    named = stream.name("texts").parallel(3)
    assert last(stream) is before
    assert (before.label, before.parallelism, operators(stream)) == ("map", None, ["map"])
    assert (last(named).label, last(named).parallelism, operators(named)) == ("texts", 3, ["texts"])


def test_a_table_can_be_named_and_given_subtasks() -> None:
    some = table().drop("n").name("some").parallel(3)
    assert repr(some).startswith("<Table some [")
    assert last(some).parallelism == 3


@pytest.mark.parametrize("label", ["", "  ", None, "a\nb", "a\x1b[31mb", "a\tb"])
def test_a_name_is_a_text(label: Any) -> None:
    with pytest.raises(UsageError, match="name takes a text"):
        rows().name(label)


@pytest.mark.parametrize("method", ["parallel", "name"])
def test_parallel_and_name_need_an_operator_before_them(method: str) -> None:
    argument = {"parallel": 2, "name": "x"}[method]
    for stream in (rows().union(rows()), rows().rebalance()):
        with pytest.raises(InvalidGraph, match=rf"{method}\(\) must directly follow"):
            getattr(stream, method)(argument)


def test_a_slot_group_is_that_of_the_operator_before() -> None:
    stream = rows().map(dict).slot_group("wide")
    assert last(stream).slot_group == "wide"
    assert last(stream.filter(bool)).slot_group is None, "it is for the planner to hand it on"
    with pytest.raises(UsageError, match="^slot_group takes a name of 1 to .*, not ''"):
        rows().slot_group("")


# --- who gets which record --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rebalance", "rescale", "forward", "broadcast"])
@pytest.mark.parametrize("make", [rows, table])
def test_a_choice_of_subtasks_is_that_of_the_next_step(make: Callable[[], Any], how: str) -> None:
    chosen = getattr(make(), how)()
    assert type(chosen) is type(make())
    assert [feed.exchange for feed in chosen.plan.feeds] == [Exchange(how)]  # type: ignore[arg-type]
    assert last(chosen).is_source, "the choice is no step of its own"


def test_only_one_choice_of_subtasks_at_a_time() -> None:
    with pytest.raises(InvalidGraph, match=r"broadcast\(\) follows another choice"):
        rows().rebalance().broadcast()
    with pytest.raises(InvalidGraph, match=r"forward\(\) follows another choice"):
        rows().rebalance().key_by(abs).count().rebalance().forward()


@pytest.mark.parametrize("kind", get_args(PartitionKind))
def test_partitions_are_of_the_kind_that_is_said(kind: PartitionKind) -> None:
    (feed,) = rows().rescale().exchange(kind).plan.feeds
    assert feed.exchange == Exchange("rescale", kind=kind)


def test_another_kind_of_partition_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        rows().exchange("lossy")  # type: ignore[arg-type]
    kinds = ", ".join(get_args(PartitionKind))
    assert str(raised.value) == f"exchange is 'lossy': write one of {kinds}"


# --- side outputs -----------------------------------------------------------------------------------


def test_late_records_are_a_stream_of_their_own() -> None:
    windows = table().event_time("t").key_by("user").window(HOUR, late="side")
    counts, totals = windows.count(), windows.aggregate(n=("n", "sum"))
    (one,), (other,) = counts.late.plan.feeds, totals.late.plan.feeds
    assert one.node is last(counts)
    assert one.side == other.side == "late"
    assert one.node is not other.node
    assert totals.late.plan.gives.schema == SCHEMA
    assert totals.late.plan.gives.time == EventTime(column="t")
    renamed = totals.name("totals").parallel(3)
    assert [feed.node for feed in renamed.late.plan.feeds] == list(renamed.plan.ends)


def test_streams_without_late_records_say_so() -> None:
    counts = timed().key_by("user").window(HOUR, late="side").count()
    for stream in (rows(), timed().key_by("user").window(HOUR).count(), counts.filter(bool)):
        with pytest.raises(InvalidGraph, match=r"\.late must directly follow .* late='side'"):
            _ = stream.late
    with pytest.raises(InvalidGraph, match=r"\.panes must directly follow .* allowed_lateness or early"):
        _ = timed().key_by("user").window(HOUR).count().panes
    with pytest.raises(InvalidGraph, match=r"\.late_right must directly follow"):
        _ = counts.late_right


# --- explain ----------------------------------------------------------------------------------------


def test_explain_shows_both_plans_and_says_where_a_sink_is_missing() -> None:
    copies = rows().map(dict).name("copies")
    texts = [copies.collect().explain(parallelism=2), copies.explain()]
    assert ["copies" in text for text in texts] == [True, True]
    assert ["no sink yet: end it with collect()" in text for text in texts] == [False, True]
