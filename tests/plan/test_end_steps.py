"""Sources and sinks as steps: whether they end, what they read, and what they write to."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from minishuffle.api.stream import Stream, Table
from minishuffle.plan.end_steps import ExternalStep, ScanStep, SinkStep


def test_a_scan_reads_only_the_columns_that_are_needed_if_it_can(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "1.parquet")
    scan = Table.from_files(tmp_path).plan.ends[0].step
    assert isinstance(scan, ScanStep)
    narrowed = scan.projected(frozenset("a"))
    assert narrowed.source.columns == ["a"]  # type: ignore[attr-defined]
    assert scan.source.columns is not narrowed.source.columns  # type: ignore[attr-defined]
    items = Stream.items([1]).plan.ends[0].step
    assert isinstance(items, ScanStep) and items.projected(frozenset("a")) is items


def test_sources_say_whether_they_end() -> None:
    assert Stream.items([1]).plan.bounded
    assert not Stream.generate().plan.bounded
    external = Table.from_spark("sales", {"n": int}, bounded=False).plan.ends[0].step
    assert isinstance(external, ExternalStep) and not external.bounded


def test_what_precedes_acknowledged_positions_is_not_read_again() -> None:
    scan = Stream.items([1]).plan.ends[0].step
    assert isinstance(scan, ScanStep) and scan.replayable
    scan.source.acknowledge = lambda positions: None  # type: ignore[union-attr]
    assert not scan.replayable


def test_a_sink_of_files_claims_its_directory(tmp_path: Path) -> None:
    (step,) = (node.step for node in Stream.items([1]).to_files(tmp_path).plan.ends)
    assert isinstance(step, SinkStep)
    assert step.claim() == str(tmp_path)
    (step,) = (node.step for node in Stream.items([1]).collect("x").plan.ends)
    assert isinstance(step, SinkStep) and step.claim() is None and step.collects == "x"
