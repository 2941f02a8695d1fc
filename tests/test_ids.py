"""How identifiers are written and read."""

from __future__ import annotations

import itertools

import pytest

from minishuffle.errors import UsageError
from minishuffle.ids import (
    Address,
    AttemptId,
    JobId,
    OperatorId,
    PartitionId,
    SubtaskId,
    held_operator,
    holder_operator,
    is_holder,
    is_snapshot_edge,
    is_state_edge,
    snapshot_edge,
    state_edge,
)


def test_identifiers_are_short_and_tell_everything() -> None:
    subtask = SubtaskId(JobId("j1"), OperatorId(2), 3)
    assert str(subtask) == "j1/2.3"
    assert str(AttemptId(subtask, 4)) == "j1/2.3#4"
    assert str(PartitionId(JobId("j1"), 5, 6)) == "j1/edge5.6"
    assert AttemptId.of("j1", 2, 3, 4) == AttemptId(subtask, 4) and subtask.key == (2, 3)


def test_identifiers_sort_by_job_then_operator_then_index() -> None:
    ids = [SubtaskId(JobId(job), OperatorId(o), i) for job in ("j1", "j2") for o in (0, 1) for i in (0, 1)]
    assert all(one < other for one, other in itertools.pairwise(ids))
    assert AttemptId(ids[0], 1) < AttemptId(ids[0], 2) < AttemptId(ids[1], 1)


@pytest.mark.parametrize("operator", [0, 7, 65_535, (1 << 30) - 1])
def test_state_snapshots_and_holders_have_numbers_of_their_own(operator: int) -> None:
    state, snapshots, holder = state_edge(operator), snapshot_edge(operator), holder_operator(operator)
    assert state < 1 << 32 and snapshots < 1 << 32 and holder < 1 << 32  # fields of frames are u32
    assert [is_state_edge(edge) for edge in (operator, state, snapshots)] == [False, True, False]
    assert [is_snapshot_edge(edge) for edge in (operator, state, snapshots)] == [False, False, True]
    assert is_holder(holder) and not is_holder(operator) and held_operator(holder) == operator


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8471", Address("127.0.0.1", 8471)),
        ("localhost:1", Address("localhost", 1)),
        ("example.org:65535", Address("example.org", 65535)),
        ("[::1]:8471", Address("::1", 8471)),
    ],
)
def test_address_is_written_as_it_is_read(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8471",
        ":8471",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:x",
        "host:1.5",
        "host: 1",
    ],
)
def test_text_that_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="write HOST:PORT, for example"):
        Address.parse(text)
