"""Facts about attempts: how they are packed, and what is refused."""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import RemoteProtocolError
from minishuffle.wire.control import pack_message, unpack_message
from minishuffle.wire.reports import AttemptReport, Fact, PartitionReadable, TaskStateChanged
from support.attempts import attempt

READABLE = PartitionReadable(attempt=attempt(2, 3, 4), edge=5)


def test_a_fact_names_its_attempt_by_four_values() -> None:
    body = pack_message(AttemptReport(term=7, number=1, facts=[READABLE]))
    fact = {"kind": "partition_readable", "attempt": ["j1", 2, 3, 4], "edge": 5}
    assert msgpack.unpackb(body) == {"type": "attempt_report", "term": 7, "number": 1, "facts": [fact]}
    assert unpack_message(body) == AttemptReport(term=7, number=1, facts=[READABLE])


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"attempt": ["j1", 2, 3]}, "attempt.3"),
        ({"attempt": ["j1", 2, 3, -1]}, "attempt.3"),
        ({"attempt": ["j1", 2, 1 << 63, 1]}, "attempt.2"),
        ({"attempt": "j1/2.3#4"}, "attempt"),
        ({"kind": "nothing"}, "facts.0"),
        ({"more": 1}, "more"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], where: str) -> None:
    fact = {"kind": "partition_readable", "attempt": ["j1", 2, 3, 4], "edge": 5} | fields
    body = msgpack.packb({"type": "attempt_report", "term": 7, "facts": [fact]})
    with pytest.raises(RemoteProtocolError, match=where):
        unpack_message(body)


def test_each_fact_has_a_kind_of_its_own() -> None:
    kinds = [each.model_fields["kind"].default for each in get_args(Fact)]
    assert len({*kinds}) == len(kinds) > 1


def test_an_attempt_that_runs_has_not_ended_and_sends_no_counters() -> None:
    ended = TaskStateChanged(attempt=attempt(), state="failed", counters=TaskCounters(records_in=1))
    assert ended.ends and not ended.is_short
    running = TaskStateChanged(attempt=attempt(), state="running")
    assert running.is_short and not running.ends
    report = AttemptReport(term=7, facts=[running, ended])
    assert ["counters" in fact for fact in msgpack.unpackb(pack_message(report))["facts"]] == [False, True]
    assert unpack_message(pack_message(report)) == report
