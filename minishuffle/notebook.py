"""What notebooks show of clusters and jobs: tables of HTML, and one that is live while a program waits for a
job.

They need no extension and no colour of their own, so that they fit light and dark pages. Nothing here imports
IPython: where it is not loaded there is no notebook.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from html import escape
from typing import Any, Final

from minishuffle.counters import TaskCounters
from minishuffle.observe.loads import Level, VertexLoad, loads_between
from minishuffle.wire.requests import ClusterStatus, JobInfo, TaskInfo

__all__ = ["LIVE_SECONDS", "cluster_html", "job_html", "live_table"]

LIVE_SECONDS: Final = 0.5
"""Between two looks at a job whose table is live."""
LOOKS: Final = 4
"""So many looks back begins the time of which a live table shows shares: workers report less often than it
changes."""

Cell = tuple[str, str]
"""A text, and the style of its cell."""
_LEFT: Final = "text-align: left"
_RIGHT: Final = "text-align: right"
_COLOURS: Final[dict[Level, str]] = {"OK": "128, 128, 128", "LOW": "230, 160, 0", "HIGH": "220, 50, 50"}
"""Colours of the bars behind shares, over whatever background there is."""


def job_html(job: JobInfo, before: JobInfo | None = None) -> str:
    """A job and its vertices, a row each: records so far, and the greatest shares of their time that subtasks
    were busy and back-pressured, since ``before`` or since they began."""
    tasks: dict[int, list[TaskInfo]] = {}
    for task in job.tasks:
        tasks.setdefault(task.operator, []).append(task)
    looked = {(task.operator, task.index): TaskCounters() for task in job.tasks}
    if before is not None:
        looked |= {(task.operator, task.index): task.counters for task in before.tasks}
    loads = loads_between(looked, job.tasks)
    vertices = [_vertex(load, tasks[number]) for number, load in zip(sorted(tasks), loads, strict=True)]
    numbers = ["records in", "records out", "busy", "back-pressured"]
    heads = [*map(_text, ["vertex", "subtasks"]), *map(_number, numbers)]
    causes = [f"{cause.task}: {cause.text}" for cause in job.causes[:1]]
    lines = [f"job {job.job} ({job.name}): {job.state}, {_seconds(job):.1f} s", *causes]
    return "".join(f"<div>{escape(line)}</div>" for line in lines) + _table(heads, vertices)


def cluster_html(status: ClusterStatus) -> str:
    """The workers and the jobs of a cluster, a row each."""
    heads = [*map(_text, ["worker", "state"]), *map(_number, ["process", "slots free"])]
    workers = [
        [
            _text(str(worker.worker)),
            _text("standby" if worker.standby else worker.state),
            _number(str(worker.pid)),
            _number(f"{worker.slots_free} of {worker.slots}"),
        ]
        for worker in status.workers
    ]
    jobs = [
        [*map(_text, [job.job, job.name, job.state]), _number(f"{_seconds(job):.1f} s")]
        for job in status.jobs
    ]
    found = _table(heads, workers)
    return found + _table([*map(_text, ["job", "name", "state"]), _number("time")], jobs) if jobs else found


def _seconds(job: JobInfo) -> float:
    return (job.ended_at or job.at) - job.submitted_at


def _vertex(load: VertexLoad, tasks: list[TaskInfo]) -> list[Cell]:
    states = Counter(task.state for task in tasks)
    return [
        _text(load.name),
        _text(", ".join(f"{count} {state}" for state, count in states.items())),
        _number(f"{sum(task.counters.records_in for task in tasks):,}"),
        _number(f"{sum(task.counters.records_out for task in tasks):,}"),
        _share(load.busy, "OK"),
        _share(load.backpressured, load.level),
    ]


def _text(text: str) -> Cell:
    return text, _LEFT


def _number(text: str) -> Cell:
    return text, _RIGHT


def _share(share: float, level: Level) -> Cell:
    bar = f"rgba({_COLOURS[level]}, 0.35) {share:.0%}, transparent {share:.0%}"
    return f"{share:.0%}", f"{_RIGHT}; background: linear-gradient(to right, {bar})"


def _table(heads: Iterable[Cell], rows: Iterable[list[Cell]]) -> str:
    lines = [_row("th", heads), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Iterable[Cell]) -> str:
    return (
        "<tr>" + "".join(f'<{tag} style="{style}">{escape(text)}</{tag}>' for text, style in cells) + "</tr>"
    )


# --- live -----------------------------------------------------------------------------------------


class ShownJob:
    """What IPython displays of one look at a job."""

    def __init__(self, job: JobInfo, before: JobInfo | None) -> None:
        self._job = job
        self._before = before

    def __repr__(self) -> str:
        return f"job {self._job.job} ({self._job.name}): {self._job.state}"

    def _repr_html_(self) -> str:
        return job_html(self._job, self._before)


def live_table() -> Callable[[JobInfo], None] | None:
    """Takes each look at a job, and shows the last one below the cell that runs; None: this is no notebook.

    The last table, with the totals of the job, stays there.
    """
    loaded: Any = sys.modules.get("IPython")
    shell_of = getattr(loaded, "get_ipython", None)  # It may be half imported, by another thread.
    if shell_of is None or getattr(shell_of(), "kernel", None) is None:  # A terminal has none.
        return None
    shown: Any = None
    looks: deque[JobInfo] = deque(maxlen=LOOKS)

    def show(job: JobInfo) -> None:
        nonlocal shown
        table = ShownJob(job, looks[0] if looks and not job.ended_at else None)
        if shown is None:
            shown = loaded.display.display(table, display_id=True)
        else:
            shown.update(table)
        looks.append(job)

    return show
