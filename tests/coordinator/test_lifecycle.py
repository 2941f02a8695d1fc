"""The tables of moves of jobs and tasks."""

from __future__ import annotations

from minishuffle.coordinator.lifecycle import ENDED, JOB_MOVES, JOB_OVER, PENDING, TASK_MOVES, WAITING


def test_the_tables_of_moves_are_closed() -> None:
    """What a move leads to is a state with moves of its own, or an end."""
    assert set().union(*TASK_MOVES.values()) == set(TASK_MOVES) - {WAITING}
    assert set().union(*JOB_MOVES.values()) == (set(JOB_MOVES) | JOB_OVER) - {"created"}


def test_every_state_of_a_task_is_one_of_a_kind() -> None:
    assert set(TASK_MOVES) == ENDED | PENDING | {WAITING, "created", "running"}
