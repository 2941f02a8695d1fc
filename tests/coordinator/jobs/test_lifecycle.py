"""The tables of transitions of tasks and jobs: closed, walked by transcripts, and the only way to a state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from minishuffle.coordinator.jobs import job
from minishuffle.coordinator.jobs.lifecycle import (
    ENDED,
    JOB_ENDED,
    JOB_TRANSITIONS,
    PENDING,
    TASK_TRANSITIONS,
    WAITING,
    Actor,
    JobEffect,
    TaskEffect,
    effects_of,
)
from support.sources import PACKAGE, Module, modules
from support.transcripts import CoordinatorTranscript, played

TABLES: dict[str, Any] = {"task": TASK_TRANSITIONS, "job": JOB_TRANSITIONS}
TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"


def states(table: str) -> set[str]:
    return {state for ends in TABLES[table] for state in ends}


def test_the_tables_are_closed() -> None:
    """What one leads to is a state with transitions of its own, or an end. Each effect belongs to some."""
    for table, first, ends in (("task", {WAITING}, set[str]()), ("job", {"created"}, JOB_ENDED)):
        before, after = ({both[end] for both in TABLES[table]} for end in (0, 1))
        assert after == (before | ends) - first
    for table, kind in (("task", TaskEffect), ("job", JobEffect)):
        assert {each for one in TABLES[table].values() for each in one.effects} == set(get_args(kind))


def test_every_state_of_a_task_is_one_of_a_kind() -> None:
    assert states("task") == ENDED | PENDING | {WAITING, "created", "running"}


@pytest.mark.parametrize("table", TABLES)
def test_what_is_not_in_the_table_or_not_for_that_actor_is_refused(table: str) -> None:
    allowed = {(*ends, by) for ends, each in TABLES[table].items() for by in each.by}
    for before, to, by in set(product(states(table), states(table), get_args(Actor))) - allowed:
        with pytest.raises(AssertionError, match=f"read.0.: the {by} may not bring it from {before} to {to}"):
            effects_of(TABLES[table], "read[0]", before, to, by)


def test_every_transition_is_in_a_transcript_for_each_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {
        (name, *ends, by) for name, table in TABLES.items() for ends, each in table.items() for by in each.by
    }

    def noted(table: Any, name: str, before: str, to: str, by: Any) -> tuple[Any, ...]:
        left.discard(("job" if table is JOB_TRANSITIONS else "task", before, to, by))
        return effects_of(table, name, before, to, by)

    monkeypatch.setattr(job, "effects_of", noted)
    for path in sorted(TRANSCRIPTS.glob("*.txt"), reverse=True):
        if left:
            played(path, CoordinatorTranscript)
    assert left == set()


def assigned_states(module: Module) -> Iterator[str]:
    """The functions that assign an attribute called ``state``. (That of a worker is of its registration.)"""
    for function in module.functions():
        for node in ast.walk(function):
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if stored and node.attr == "state":
                yield f"{module.name} {function.name}"


def test_nothing_else_changes_a_state() -> None:
    found = {each for module in modules(PACKAGE / "coordinator") for each in assigned_states(module)}
    assert {each for each in found if not each.startswith("workers.py")} == {
        "jobs/job.py __init__",
        "jobs/job.py _transition_job",
        "jobs/job.py recall",
        "jobs/subtasks.py enter",
    }
