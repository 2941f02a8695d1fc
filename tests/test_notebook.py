"""What notebooks show of jobs and clusters: the tables, and the live one."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.notebook import LOOKS, cluster_html, job_html, live_table
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.requests import ClusterStatus, JobInfo, TaskInfo, WorkerInfo, WorkerReport


def job(seconds: float, records: int, state: str = "running", **fields: Any) -> JobInfo:
    """One whose sink has been busy for a quarter of its time, and whose source was held back in all the time
    behind the first second."""
    source = TaskCounters(
        records_out=records, busy_seconds=min(seconds, 1.0), backpressured_seconds=max(seconds - 1.0, 0.0)
    )
    sink = TaskCounters(records_in=records, busy_seconds=seconds / 4, idle_seconds=seconds * 3 / 4)
    tasks = [
        TaskInfo(operator=1, name="to_count", index=0, attempt=1, state=state, worker=1, counters=sink),
        TaskInfo(operator=0, name="a < b", index=0, attempt=1, state=state, worker=1, counters=source),
        TaskInfo(operator=0, name="a < b", index=1, attempt=1, state="created", worker=2, counters=source),
    ]
    return JobInfo(
        job="j1", name="<b>", state=state, submitted_at=10.0, at=10.0 + seconds, tasks=tasks, **fields
    )


def cells(html: str) -> list[list[str]]:
    """The texts of each row."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_a_job_shows_its_vertices() -> None:
    html = job_html(job(4.0, 1000, causes=[ErrorInfo(code=1, text="1 > 2", task="a")]))
    assert html.startswith("<div>job j1 (&lt;b&gt;): running, 4.0 s</div><div>a: 1 &gt; 2</div><table>")
    assert cells(html) == [
        ["vertex", "subtasks", "records in", "records out", "busy", "back-pressured"],
        ["a &lt; b", "1 running, 1 created", "0", "2,000", "25%", "75%"],
        ["to_count", "1 running", "1,000", "0", "25%", "0%"],
    ]


def test_shares_are_of_the_time_between_two_looks() -> None:
    assert [row[4:] for row in cells(job_html(job(4.0, 1000), job(2.0, 500)))][1:] == [
        ["0%", "100%"],
        ["25%", "0%"],
    ]
    assert [row[4:] for row in cells(job_html(job(0.0, 0)))][1:] == [["0%", "0%"]] * 2


def test_a_cluster_shows_its_workers_and_jobs() -> None:
    worker = WorkerInfo(
        worker=1,
        epoch=1,
        state="alive",
        host="127.0.0.1",
        pid=77,
        data_port=1,
        metrics_port=2,
        slots=2,
        slots_free=1,
        heartbeat_age_seconds=0.0,
        report=WorkerReport(),
        peers=[],
    )
    fields: dict[str, Any] = {"cluster": "local", "version": "1", "term": 1, "pid": 1, "web_port": 1}
    workers = [["worker", "state", "process", "slots free"], ["1", "alive", "77", "1 of 2"]]
    assert cells(cluster_html(ClusterStatus(**fields, workers=[worker], jobs=[]))) == workers
    ended = job(4.0, 0, "finished", ended_at=12.0)
    assert cells(cluster_html(ClusterStatus(**fields, workers=[worker], jobs=[ended]))) == [
        *workers,
        ["job", "name", "state", "time"],
        ["j1", "&lt;b&gt;", "finished", "2.0 s"],
    ]


class Display:
    """IPython as far as a live table needs it."""

    def __init__(self, *, kernel: bool) -> None:
        self.displays: list[list[Any]] = []
        self.display = SimpleNamespace(display=self._display)
        self._shell = SimpleNamespace(kernel=self) if kernel else SimpleNamespace()

    def get_ipython(self) -> SimpleNamespace:
        return self._shell

    def _display(self, table: Any, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown = [table]
        self.displays.append(shown)
        return SimpleNamespace(update=shown.append)


def test_a_live_table_is_one_display_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = Display(kernel=True)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    show = live_table()
    assert show is not None
    looks = [job(float(seconds), 0) for seconds in range(LOOKS + 3)]
    last = job(9.0, 0, "finished", ended_at=19.0)
    for each in (*looks, last):
        show(each)
    [tables] = ipython.displays
    assert repr(tables[-1]) == "job j1 (<b>): finished"
    before = [None, *[looks[0]] * LOOKS, looks[1], looks[2], None]
    assert [table._repr_html_() for table in tables] == list(map(job_html, (*looks, last), before))


def test_there_is_none_outside_of_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert live_table() is None
    for other in (Display(kernel=False), SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "IPython", other)
        assert live_table() is None
