"""State that was taken stays as it was while its operator goes on: it is written to disk meanwhile."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.operators.state_parts import StatePart
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
