"""What ``explain`` and ``submit --describe`` say of nodes, exchanges, stages and slots."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.plan.explain import plan_lines, plan_map
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import JobPlan, plan_job


def plan(*, blocking: bool, **settings: Any) -> JobPlan:
    rows = Stream.items(["a"])
    stored = rows.map(str.upper)
    stored = stored.exchange("blocking") if blocking else stored
    both = stored.union(rows.filter(bool)).collect()
    return plan_job(both, parallelism=2, settings=JobSettings(**settings))


def windows() -> Table:
    sales = pa.table({"user": ["a"], "at": [1], "n": [2], "city": ["Oslo"], "note": ["x"]})
    table = Table.from_arrow(sales).event_time("at").filter(pc.field("city") == "Oslo").rebalance()
    return (
        table.with_columns(m=pc.field("n") * 2)
        .key_by("user")
        .window(timedelta(hours=1))
        .aggregate(total=("m", "sum"))
    )


def test_nodes_are_shown_with_schema_event_time_and_id() -> None:
    text = re.sub("-[0-9a-f]{12}", "-…", windows().name("hours").collect().explain(parallelism=2))
    assert text.splitlines()[:10] == [
        "logical plan:",
        "  1. from_arrow; user: string, at: int64, n: int64, city: string, note: string",
        "  2. event_time of 1; user: string, at: int64, n: int64, city: string, note: string; "
        "event time in column at; id event_time-…",
        "  3. filter of 2; user: string, at: int64, n: int64, city: string, note: string; "
        "event time in column at",
        "  4. exchange of 3 (rebalance)",
        "  5. with_columns of 4; user: string, at: int64, n: int64, city: string, note: string, "
        "m: int64; event time in column at",
        "  6. exchange of 5 (hash by user)",
        "  7. hours of 6; user: string, window_start: timestamp[us, tz=UTC], "
        "window_end: timestamp[us, tz=UTC], total: int64; event time in column window_end-1 µs; id hours",
        "  8. collect of 7",
        "",
    ]


def test_what_is_shipped_is_shown_with_who_reads_it() -> None:
    lines = plan_lines(plan_job(windows().collect(), parallelism=2))
    assert [line.strip() for line in lines if "ships" in line] == [
        "ships at (window_aggregate), n (with_columns), user (key of window_aggregate)",
        "ships at (window_aggregate), m (window_aggregate), user (key of window_aggregate)",
    ]
    whole = plan_lines(plan_job(windows().collect(), parallelism=2, optimise=["chaining"]))
    assert [line.strip() for line in whole if "ships" in line] == [
        "ships all of each record (what follows with_columns), with event times",
        "ships all of each record (what follows window_aggregate), with event times",
    ]


def test_a_plan_without_a_sink_is_shown_as_far_as_it_goes() -> None:
    late = windows().key_by("user").count().rebalance()
    lines = late.explain(parallelism=2).splitlines()
    end = lines.index("  no sink yet: end it with collect() or another one to run it")
    assert lines[end - 1] == "  10. exchange of 9 (rebalance)"
    assert lines[end + 3] == "  from_arrow -> event_time -> filter"
    left = Stream.items([1]).forward().map(abs).to_count().explain()
    assert left.splitlines()[2:5] == [
        "  2. forward of 1; Python objects",
        "  3. map of 2; Python objects",
        "  4. to_count of 3",
    ]
    aside = Stream.items([1]).map(abs, sides=["odd"]).side("odd")
    assert "  2. map of 1; Python objects" in aside.explain().splitlines()


def test_of_rows_that_are_counted_the_keys_alone_are_shipped() -> None:
    keyed = Stream.items(["a"]).key_by(str.upper)
    for counted, ships in (
        (keyed.count(), "the keys alone (count)"),
        (keyed.reduce(max), "all of each record (reduce)"),
    ):
        assert f"    ships {ships}" in plan_lines(plan_job(counted.collect(), parallelism=2))


def test_ids_are_those_of_the_way_from_the_sources() -> None:
    def ids(**settings: Any) -> list[str]:
        return [node["id"] for node in plan_map(plan_job(windows().collect(), **settings))["nodes"]]

    assert ids() == ids(parallelism=3, optimise=[])
    assert len(set(ids()) - {None}) == 2
    other = windows().filter(pc.field("total") > 1).key_by("user").count().collect()
    nodes = plan_map(plan_job(other))["nodes"]
    assert [node["id"] for node in nodes][: len(ids()) - 1] == ids()[:-1]


def test_exchanges_are_shown_with_their_kind_and_why() -> None:
    lines = plan_lines(plan(blocking=True))
    assert [line for line in lines[lines.index("exchanges:") + 1 :] if "ships" not in line] == [
        "  items => map: forward, pipelined_bounded",
        "  items => filter: forward, pipelined_bounded",
        "  map => collect: forward, blocking",
        "  filter => collect: forward, blocking (since it joins both ends of map => collect, which is "
        "blocking)",
        "",
        "schedule eager: all at once, 2 slots",
    ]


@pytest.mark.parametrize(
    ("blocking", "settings", "expected"),
    [
        (
            True,
            {"schedule": "stages"},
            "schedule stages: each when all of its blocking inputs are complete, 2 slots",
        ),
        (
            False,
            {"schedule": "stages"},
            "schedule stages is eager here, as no exchange is blocking: all at once, 2 slots",
        ),
        (
            False,
            {"schedule": "first_output"},
            "schedule first_output: each when any of its inputs have rows, 2 slots",
        ),
    ],
)
def test_the_schedule_is_said(blocking: bool, settings: dict[str, Any], expected: str) -> None:
    lines = plan_lines(plan(blocking=blocking, **settings))
    at = lines.index(expected)
    stages = ["  1: items; map; filter", "  2: collect, after 1"]
    assert lines[at + 1 :] == (stages if blocking else [])


def test_json_has_the_same() -> None:
    shown = plan_map(plan(blocking=True, schedule="stages", start_when="any"))
    assert [edge["kind"] for edge in shown["exchanges"]] == ["pipelined_bounded"] * 2 + ["blocking"] * 2
    assert [edge["because_of"] for edge in shown["exchanges"]] == [None, None, None, 2]
    assert shown["stages"] == [
        {"operators": ["items", "map", "filter"], "after": []},
        {"operators": ["collect"], "after": [0]},
    ]
    assert (shown["schedule"], shown["start_when"], shown["slots"]) == ("stages", "any", 2)
    assert plan_map(plan(blocking=False))["start_when"] is None
