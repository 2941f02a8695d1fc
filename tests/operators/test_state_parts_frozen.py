"""State that was taken stays as it was while its operator goes on, and is written or even made meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pyarrow as pa
import pytest

from minishuffle.operators import column_store, keyed_state
from minishuffle.operators.state_parts import KEY, StatePart, from_column
from support.stateful import CASES, Run, head, tail


def copied(parts: list[StatePart]) -> list[bytes]:
    found = []
    for part in parts:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, part.batch.schema) as stream:
            stream.write_batch(part.batch)
        found.append(sink.getvalue().to_pybytes())
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_was_taken_does_not_change_with_what_comes_later(name: str) -> None:
    run = Run(name)
    run.take(head(name))
    taken = list(run.operator.write_state())
    assert taken
    before = copied(taken)
    run.take(tail(name))
    run.finish()
    assert copied(taken) == before


def rows_of(parts: Iterable[StatePart]) -> dict[str, list[str]]:
    """By name the rows, however they are divided into parts."""
    found: dict[str, list[str]] = {}
    for part in parts:
        columns = {
            name: from_column(column) if name in (KEY, "value", "row") else column.to_pylist()
            for name, column in zip(part.batch.schema.names, part.batch.columns, strict=True)
        }
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        found.setdefault(part.name, []).extend(map(repr, rows))
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_made_while_it_goes_on_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_state, "SLICE_ROWS", 5)
    monkeypatch.setattr(column_store, "SLICE_SLOTS", 5)
    run = Run(name)
    run.take(head(name))
    taken = rows_of(run.operator.write_state())
    parts, found = run.operator.freeze_state(), list[StatePart]()
    for item in tail(name):
        run.take([item])
        found += islice(parts, 1)
    alone = Run(name)
    alone.take([*head(name), *tail(name)])
    assert run.finish() == alone.finish()
    assert rows_of([*found, *parts]) == taken


@pytest.mark.parametrize("name", CASES)
def test_what_is_made_late_of_one_is_as_it_was_when_the_next_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_state, "SLICE_ROWS", 5)
    monkeypatch.setattr(column_store, "SLICE_SLOTS", 5)
    run, rest = Run(name), tail(name)
    run.take(head(name))
    taken = [rows_of(run.operator.write_state())]
    first, found = run.operator.freeze_state(), [list[StatePart](), list[StatePart]()]
    found[0] += islice(first, 1)
    for item in rest[: len(rest) // 3]:
        run.take([item])
    taken.append(rows_of(run.operator.write_state()))
    second = run.operator.freeze_state()
    for item in rest[len(rest) // 3 :]:
        run.take([item])
        found[0] += islice(first, 1)
        found[1] += islice(second, 1)
    alone = Run(name)
    alone.take([*head(name), *rest])
    assert run.finish() == alone.finish()
    assert [rows_of([*found[0], *first]), rows_of([*found[1], *second])] == taken
