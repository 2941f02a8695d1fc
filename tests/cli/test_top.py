"""What a vertex did between two looks at its job, and how often ``top`` looks."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest

from minishuffle.cli.top import SPAN_SECONDS, _job_map, _shown, _Span, looks
from minishuffle.console import console
from minishuffle.counters import TaskCounters
from minishuffle.observe.diagnosis import Judged, Link, level_loads
from minishuffle.observe.loads import VertexLoad, level_of, vertex_loads
from minishuffle.wire.requests import DeployWait, JobInfo, TaskInfo


def job(*counters: tuple[str, int, TaskCounters]) -> JobInfo:
    """A job of these subtasks: vertex, index, counters."""
    names = sorted({name for name, _, _ in counters})
    tasks = [
        TaskInfo(
            operator=names.index(name),
            name=name,
            index=index,
            attempt=1,
            state="running",
            worker=1 + index,
            counters=each,
        )
        for name, index, each in counters
    ]
    return JobInfo(
        job="j1", name="words", state="running", submitted_at=1.0, ended_at=0.0, tasks=tasks, causes=[]
    )


@pytest.mark.parametrize(
    ("share", "level"),
    [(0.0, "OK"), (0.10, "OK"), (0.11, "LOW"), (0.50, "LOW"), (0.51, "HIGH"), (1.0, "HIGH")],
)
def test_levels_are_those_of_flink(share: float, level: str) -> None:
    assert level_of(share) == level


def test_a_vertex_is_as_back_pressured_as_its_worst_subtask() -> None:
    before = job(
        ("lines", 0, TaskCounters(busy_seconds=5.0, records_out=100)),
        ("lines", 1, TaskCounters(busy_seconds=5.0, backpressured_seconds=1.0)),
    )
    after = job(
        ("lines", 0, TaskCounters(busy_seconds=6.5, backpressured_seconds=0.5, records_out=300)),
        ("lines", 1, TaskCounters(busy_seconds=5.25, backpressured_seconds=1.75, records_out=50)),
    )
    (load,) = vertex_loads(before, after)
    assert isinstance(load, VertexLoad)
    assert (load.level, load.backpressured, load.most_backpressured) == ("HIGH", 0.75, 1)
    assert (load.busy, load.busiest) == (0.75, 0)
    assert load.records_out == 100 + 50, "each by its own two seconds and one"
    assert [(each.index, each.worker) for each in load.subtasks] == [(0, 1), (1, 2)]


def test_a_subtask_of_which_nothing_was_heard_has_no_rates() -> None:
    silent = job(("count", 0, TaskCounters(busy_seconds=5.0, records_in=10)))
    (load,) = vertex_loads(silent, silent)
    assert (load.level, load.busy, load.records_in) == ("OK", 0.0, 0.0)


class CountingClient:
    """One job that runs, and reports the time that passed."""

    def __init__(self, clock: list[float]) -> None:
        self.requests: list[str] = []
        self._clock = clock

    def job(self, name: str) -> JobInfo:
        self.requests.append(name)
        return job(("lines", 0, TaskCounters(busy_seconds=self._clock[0])))

    def jobs(self, *, tasks: bool = True) -> list[JobInfo]:
        assert not tasks, "the list is long where jobs are many"
        self.requests.append("")
        return [job()]


@pytest.mark.parametrize("chosen", ["j1", None])
def test_a_look_ends_one_span_and_begins_the_next(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    client = CountingClient(clock)
    spans = list(islice(looks(client, chosen), 5))
    assert [after[0].tasks[0].counters.busy_seconds for _, after in spans] == [
        SPAN_SECONDS * number for number in (1, 2, 3, 4, 5)
    ]
    assert all(later[0][0] is earlier[1][0] for earlier, later in zip(spans, spans[1:], strict=False))
    assert len(client.requests) == 2 + 2 * 5 - 1, "the list and one look at each span, and one more to begin"


def test_what_waits_to_be_deployed_is_there() -> None:
    before = job(("lines", 0, TaskCounters()))
    waits = [DeployWait(operators=[1], text="stage 2 of 2 (count) waits for lines => count")]
    shown = _job_map(before.model_copy(update={"deploy_waits": waits}), Judged([], None))
    assert shown["waits"] == ["stage 2 of 2 (count) waits for lines => count"]


@pytest.mark.parametrize(("taken", "level"), [(100, "BEHIND"), (1000, "OK")])
def test_a_vertex_that_falls_behind_is_not_ok(
    taken: int, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = job(("lines", 0, TaskCounters()), ("map", 0, TaskCounters()))
    after = job(
        ("lines", 0, TaskCounters(idle_seconds=1.0, records_out=1000)),
        ("map", 0, TaskCounters(busy_seconds=1.0, records_in=taken)),
    )
    found = level_loads(vertex_loads(after, after), before, after, [Link(0, 1, "hash")])
    assert [each.records_in for each in found.loads] == [0, 0], "the numbers stay those of the shorter time"
    console().print(_shown(_Span([(after, found)], None, [], [])))
    lines = capsys.readouterr().out.splitlines()
    levels = {words[2]: words[3] for words in map(str.split, lines) if words[0] == "j1"}
    assert (levels["lines"], levels["map"]) == ("OK", level)
    text = "100 of 1,000 records/s, the rest waits in buffers"
    assert (f"j1 (words): map[0] falls behind: {text}" in lines) is (level == "BEHIND")
    expected = {"task": "map[0]", "why": text} if level == "BEHIND" else None
    shown: Any = _job_map(after, found)
    assert shown["falls_behind"] == expected
    assert [each["level"] for each in shown["vertices"]] == ["OK", level]
