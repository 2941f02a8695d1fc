"""Plans without the world outside: what takes the place of sources and sinks, and that nothing is opened."""

from __future__ import annotations

from datetime import timedelta

import pyarrow as pa

from minishuffle.api.stream import Stream, Table
from minishuffle.connectors.pushed import PushedSource
from minishuffle.plan.detached import detached


def test_every_source_and_sink_is_replaced_and_each_step_runs_once() -> None:
    seen = Table.from_spark("seen", {"k": int, "t": int}, bounded=False).event_time("t").parallel(3)
    known = Stream.items([{"k": 1}]).slot_group("b").to_table({"k": int})
    joined = seen.broadcast_join(known, on="k").key_by("k").window(timedelta(seconds=1)).count()
    plan = detached(Stream.together(joined.to_count(), seen.to_spark("kept")))
    assert [source.name for source in plan.sources] == ["from_spark seen", "items"]
    assert [source.bounded for source in plan.sources] == [False, True]
    assert [source.format for source in plan.sources] == ["arrow", "rows"]
    assert list(plan.ends) == ["to_count", "to_spark kept"]
    assert plan.ends["to_spark kept"].schema == pa.schema({"k": pa.int64(), "t": pa.int64()})
    names, programs = zip(*plan.programs, strict=True)
    assert {type(each.source) for each in programs if each.source is not None} == {PushedSource}
    assert sorted(name for name in names if "spark" in name) == ["from_spark seen", "to_spark kept"]
    by_kind = {spec.kind: spec.parameters for each in programs for _, spec in each.operators}
    assert by_kind["event_time"]["watermarks"] == "each"
    assert {edge.partitioner for edge in plan.edges} == {"hash", "broadcast", "forward"}


def test_a_plan_without_a_sink_ends_in_collect() -> None:
    plan = detached(Stream.items([1]).map(str))
    assert list(plan.ends) == ["collect"]
    assert [name for name, _ in plan.programs] == ["items -> map -> collect"]
