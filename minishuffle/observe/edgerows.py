"""A sample of the rows that cross an edge: the questions to workers, and the collection of their answers.
Pure.

The caller repeats the question until there are enough rows, the time is up or the job has ended, and then
asks the last one: see :class:`EdgeSample`.
"""

from __future__ import annotations

import json
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from minishuffle import limits
from minishuffle.errors import UnknownName, UsageError
from minishuffle.wire.inquiries import AskWorkers, TappedEdge, WorkersAnswered
from minishuffle.wire.requests import JOB_LIVE, GraphInfo, JobInfo

__all__ = ["SAMPLE_LOOK_SECONDS", "SAMPLE_SECONDS_DEFAULT", "EdgeRow", "EdgeRows", "EdgeSample"]

SAMPLE_LOOK_SECONDS: Final = 0.2
"""Seconds between two questions."""
SAMPLE_SECONDS_DEFAULT: Final = 10.0
"""Seconds to wait for rows."""


class EdgeRow(BaseModel):
    """A row as text; each value is cut at ``limits.TAP_VALUE_CHARS``."""

    model_config = ConfigDict(extra="forbid")

    at: float
    """Wall time at which its producer wrote it."""
    producer: int
    """Index of the subtask."""
    attempt: int
    """The producer's attempt."""
    consumer: int | None
    """Index of the subtask to which it is sent; None: all of them."""
    time: int | None
    """Event time in microseconds since 1970; None: it is not used after the edge."""
    key: str | None
    """The result of the key function; None: there is none, or the row is its own key."""
    columns: list[str]
    """Column names, the first ``limits.TAP_COLUMNS_MAX``; empty for a row that is a Python object."""
    values: list[str]
    """A value for each column, or a single one for the row."""


class EdgeRows(BaseModel):
    """Rows that have crossed an edge, in the order in which they were written."""

    model_config = ConfigDict(extra="forbid")

    job: str
    edge: int
    source: str
    target: str
    """Names of the vertices."""
    partitioner: str
    rows: list[EdgeRow] = Field(default_factory=list)
    """``limits.TAP_ROWS`` at most."""
    producers: int = 0
    """Number of attempts that wrote for the edge, at the last look."""
    silent: list[int] = Field(default_factory=list)
    """Workers that did not answer at the last look."""


class EdgeSample:
    """The sample of the rows of one edge.

    Args:
        edge: its number; None: the only one.
        tap: a unique id.

    Raises:
        UsageError: the job has ended, has no edge, or has several and ``edge`` is None.
        UnknownName: the job has no edge with this number.
    """

    def __init__(self, job: JobInfo, graph: GraphInfo, edge: int | None, tap: str) -> None:
        if job.state not in JOB_LIVE:
            raise UsageError(f"job {job.job} is {job.state}: nothing crosses its edges any more")
        if edge is None and len(graph.edges) == 1:
            edge = 0
        if edge is None or not 0 <= edge < len(graph.edges):
            raise _no_edge(graph, edge)
        ends = graph.edges[edge]
        self._tap = tap
        self.found = EdgeRows(
            job=job.job,
            edge=edge,
            source=graph.vertices[ends.source].name,
            target=graph.vertices[ends.target].name,
            partitioner=ends.partitioner,
        )

    @property
    def complete(self) -> bool:
        """Whether the sample is full."""
        return len(self.found.rows) >= limits.TAP_ROWS

    def question(self, *, ends: bool = False) -> AskWorkers:
        """The next question, or the last one."""
        edge = TappedEdge(edge=self.found.edge, tap=self._tap, ends=ends)
        return AskWorkers(job=self.found.job, tap=edge)

    def add(self, answered: WorkersAnswered) -> None:
        """Add the answers of the workers."""
        answers = [json.loads(answer) for answer in answered.answers.values()]
        young = [EdgeRow.model_validate(row) for answer in answers for row in answer["rows"]]
        rows = sorted([*self.found.rows, *young], key=lambda row: row.at)
        self.found.rows = rows[: limits.TAP_ROWS]
        self.found.producers = sum(answer["producers"] for answer in answers)
        self.found.silent = answered.silent


def _no_edge(graph: GraphInfo, edge: int | None) -> UnknownName | UsageError:
    names = [vertex.name for vertex in graph.vertices]
    known = ", ".join(
        f"{number} ({names[each.source]} => {names[each.target]})" for number, each in enumerate(graph.edges)
    )
    if not known:
        return UsageError(
            f"job {graph.job} has no edge: all of it is one chain, between whose operators no row is sent"
        )
    if edge is None:
        return UsageError(f"job {graph.job} has several edges, name one: {known}")
    return UnknownName(f"job {graph.job} has no edge {edge}; its edges: {known}")
