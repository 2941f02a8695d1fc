"""A sample of the rows that cross an edge: what to ask of workers, and what they answer, put together. Pure.

Whoever looks sends the same question again and again until there are rows enough, the time is up or the job
has ended, and then the last one: see :class:`EdgeSample`.
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
"""Between two questions."""
SAMPLE_SECONDS_DEFAULT: Final = 10.0
"""How long rows are waited for."""


class EdgeRow(BaseModel):
    """One row, as text: each value is cut at ``limits.TAP_VALUE_CHARS``."""

    model_config = ConfigDict(extra="forbid")

    at: float
    """Wall time at which its producer wrote it."""
    producer: int
    """Index of the subtask."""
    attempt: int
    """The producer's."""
    consumer: int | None
    """Index of the subtask that it goes to; None: to all of them."""
    time: int | None
    """Event time in microseconds since 1970; None: nobody behind the edge reads it."""
    key: str | None
    """What a key function gave; None: there is none, or the row is its key."""
    columns: list[str]
    """Their names, the first ``limits.TAP_COLUMNS_MAX``; none of a row that is a Python object."""
    values: list[str]
    """One for each column, or one for the row."""


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
    """Attempts that wrote for the edge, at the last look."""
    silent: list[int] = Field(default_factory=list)
    """Workers that did not answer then."""


class EdgeSample:
    """Gathers the rows of one edge.

    Args:
        edge: its number; None: the only one that there is.
        tap: an id of its own.

    Raises:
        UsageError: the job has ended, has no edge, or has several and none is named.
        UnknownName: it has no such edge.
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
        """Whether there are as many rows as a sample has."""
        return len(self.found.rows) >= limits.TAP_ROWS

    def question(self, *, ends: bool = False) -> AskWorkers:
        """The next one, or the last."""
        edge = TappedEdge(edge=self.found.edge, tap=self._tap, ends=ends)
        return AskWorkers(job=self.found.job, tap=edge)

    def add(self, answered: WorkersAnswered) -> None:
        """What the workers have answered."""
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
