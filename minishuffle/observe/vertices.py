"""A vertex of a job, as users name it."""

from __future__ import annotations

import difflib

from minishuffle.errors import UnknownName
from minishuffle.observe.diagnosis import CHAINED
from minishuffle.wire.requests import JobInfo

__all__ = ["vertex_number"]


def vertex_number(job: JobInfo, vertex: str, way: str = "") -> int:
    """The number of a vertex, given its number, its name, or the name of one of its operators.

    ``way`` is appended to the error about an unknown vertex.

    Raises:
        UnknownName: the job has no vertex with this name, or several.
    """
    names = {task.operator: task.name for task in job.tasks}
    if vertex.isdecimal() and int(vertex) in names:
        return int(vertex)
    found = [operator for operator, name in sorted(names.items()) if vertex in (name, *name.split(CHAINED))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{operator} ({name})" for operator, name in sorted(names.items()))
    if found:
        raise UnknownName(f"job {job.job} has several vertices {vertex!r}: name one by its number: {known}")
    operators = [operator for name in names.values() for operator in (name, *name.split(CHAINED))]
    near = difflib.get_close_matches(vertex, operators, 1)
    hint = f"did you mean {near[0]!r}? It has" if near else "name one by its number:"
    raise UnknownName(f"job {job.job} has no vertex or operator {vertex!r}: {hint} {known}{way}")
