"""Requests that wait: answered when there is something new, when their time is up, or at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.requests import GetEvents, GetLogs, GetRows, WaitJob

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]
READ0, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 1, 0), ("j1", 1, 1)


def test_rows_are_awaited(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    rows = cluster.ask(GetRows(job="j1", wait_seconds=9.0))
    late = cluster.ask(GetRows(job="j1", after=1, wait_seconds=9.0))
    assert cluster.reply(rows) is None
    cluster.collect(pair[0], COUNT0, b"one")
    assert cluster.reply(rows).batches == [b"one"]
    assert cluster.reply(late) is None
    cluster.report_all("j1", "finished")
    assert (cluster.reply(late).batches, cluster.reply(late).terminal) == ([], True)


def test_a_wait_is_answered_when_the_job_is_over(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    wait = cluster.ask(WaitJob(job="j1", wait_seconds=5.0))
    cluster.report_all("j1", "running")
    cluster.advance(1.0)
    assert cluster.reply(wait) is None
    cluster.report_all("j1", "finished")
    assert cluster.reply(wait).state == "finished"
    assert cluster.request(WaitJob(job="j1", wait_seconds=5.0)).state == "finished"


def test_a_wait_is_answered_when_its_time_is_up(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    waits = [cluster.ask(WaitJob(job="j1", wait_seconds=seconds)) for seconds in (2.0, 3.0, 1e9)]
    cluster.advance(1.875)
    assert [cluster.reply(wait) for wait in waits] == [None] * 3
    cluster.advance(0.125)
    assert [cluster.reply(wait) is not None for wait in waits] == [True, False, False]
    cluster.advance(58.0)
    assert [cluster.reply(wait).state for wait in waits] == ["created"] * 3
    assert cluster.request(WaitJob(job="j1", wait_seconds=0)).state == "created"


def test_events_and_logs_are_awaited(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    events = cluster.ask(GetEvents(job="j1", after=1, wait_seconds=9.0))
    logs = cluster.ask(GetLogs(job="j1", after=0, wait_seconds=9.0))
    cluster.log(pair[0], "j1", "line")
    assert (cluster.reply(logs).lines, cluster.reply(events)) == (["line"], None)
    cluster.report(pair[0], READ0, "running")
    (event,) = cluster.reply(events).events
    assert (event.number, event.kind, event.operator, event.index, event.worker) == (
        2,
        "task running",
        0,
        0,
        1,
    )
    assert event.at == 1_000_100.0
    assert cluster.request(GetEvents(job="j1", after=0, wait_seconds=9.0)).events[0].kind == "created"
    late = cluster.ask(GetEvents(job="j1", after=99, wait_seconds=9.0))
    cluster.report_all("j1", "finished")
    assert (cluster.reply(late).events, cluster.reply(late).terminal) == ([], True)


def test_more_waits_than_are_kept_of_a_client_or_in_all_are_answered_at_once(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINK_REQUESTS_MAX", 2)
    monkeypatch.setattr("minishuffle.coordinator.clients.longpolls.POLLS_MAX", 3)
    cluster.submit(make_graph())
    links = (1_000, 1_000, 1_000, 2_000, 3_000)
    asked = [(cluster.ask(WaitJob(job="j1", wait_seconds=5.0), link=link), link) for link in links]
    assert [cluster.reply(*each) is None for each in asked] == [True, True, False, True, False]
