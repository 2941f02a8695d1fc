"""The join of impressions and clicks: its generators, its answer, and a run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.examples.adrequests import BIAS, FEATURES, TASTE, AdRequests
from minishuffle.examples.ads import PairsAudit, Training, ads, answer, audit_pairs, clicked_in_time
from minishuffle.local import LocalCluster
from minishuffle.operators.base import TaskContext
from minishuffle.plan.planner import compile_job

CONTEXT = TaskContext(job="j1", name="training", index=0, parallelism=1, attempt=1)


def test_the_answer_is_what_a_dictionary_finds() -> None:
    records, requests = 5_000, AdRequests(20_000, 2.0)
    ids = np.arange(records)
    delays = dict(enumerate(requests.click_delays(ids)))
    clicked = {int(request) for request in ids[requests.clicked(ids)]}
    in_time = {request for request in clicked if delays[request] <= 2_000_000}
    assert answer(records, 2.0) == {"examples": records, "clicks": len(in_time)}
    assert 0 < len(in_time) < len(clicked) < records


def test_the_audit_of_the_join_sees_rows_that_are_lost_came_twice_or_are_wrong(tmp_path: Path) -> None:
    clicked = clicked_in_time(6, 2.0).tolist()
    clicked[4] = not clicked[4]
    for name, requests in (("first", [0, 1, 2, 4]), ("second", [2, 5])):
        clicks = [0 if clicked[each] else None for each in requests]
        rows = pa.table({"request": requests, "at_right": pa.array(clicks, pa.timestamp("us"))})
        pq.write_table(rows, tmp_path / name)
    assert audit_pairs([tmp_path / "first", tmp_path / "second"], 6, 2.0) == PairsAudit(2, 1, 1)


def test_the_join_has_two_sources_and_one_shuffle_of_each() -> None:
    graph = compile_job(ads(sources=3), parallelism=2)
    assert [vertex.parallelism for vertex in graph.vertices] == [3, 3, 2]
    assert [vertex.bounded for vertex in graph.vertices[:2]] == [False, False]
    assert [edge.partitioner for edge in graph.edges] == ["hash", "hash"]


def _examples(features: Any, clicked: Any) -> pa.RecordBatch:
    columns = {f"x{number}": features[:, number] for number in range(FEATURES)}
    at = pa.array([0 if each else None for each in clicked], pa.timestamp("us"))
    return pa.RecordBatch.from_pydict({**columns, "at_right": at})


def test_training_finds_what_decides_about_clicks() -> None:
    ids, requests = np.arange(100_000), AdRequests(20_000, 2.0)
    sink = Training()
    sink.open(CONTEXT)
    for part in np.array_split(ids, 50):
        sink.write(_examples(requests.features(part), requests.clicked(part)))
    result = sink.close()
    assert result["examples"] == len(ids)
    assert result["clicks"] == int(requests.clicked(ids).sum())
    assert np.allclose(result["weights"], [*TASTE, BIAS], atol=0.5)


@pytest.mark.slow
def test_the_job_gives_the_answer() -> None:
    """Its sources are live: a worker that gets no processor for half a second would be suspected, and rows
    for it dropped, as they should be. Here only the answer counts."""
    records = 40_000
    patient = {"suspect_after": 20.0, "heartbeat_timeout": 30.0}
    with LocalCluster(workers=2, slots=1, **patient) as cluster:
        result = cluster.submit(ads(rate=80_000, records=records, within=0.2), parallelism=2).wait(60)
    found = [sink.value for sink in result.results]
    assert {name: sum(each[name] for each in found) for name in ("examples", "clicks")} == answer(
        records, 0.2
    )
