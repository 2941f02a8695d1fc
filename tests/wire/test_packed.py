"""Tables of fixed entries in control messages."""

from __future__ import annotations

import pytest

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import RemoteProtocolError
from minishuffle.ids import AttemptId
from minishuffle.wire.control import pack_message, unpack_message
from minishuffle.wire.messages import ControlMessage, TaskReport
from minishuffle.wire.packed import (
    Cursor,
    PeerRows,
    SplitPosition,
    pack_placement,
    pack_positions,
    pack_traffic,
    unpack_placement,
    unpack_positions,
    unpack_traffic,
)
from minishuffle.wire.reports import AttemptReport, SourcePositions, TaskReleased

ATTEMPT = AttemptId.of("j1", 0, 0, 1)


def test_tables_are_read_as_they_were_written() -> None:
    entries = [PeerRows(0, 1, 1, 5, 1, 0, 0), PeerRows(2**32 - 1, 2, 3, 0, 0, 2**63, 4)]
    assert unpack_traffic(pack_traffic(entries)) == entries
    assert unpack_traffic(b"") == []
    assert unpack_placement(pack_placement([7, 8, 9])) == (7, 8, 9)
    positions = [SplitPosition(0, 5), SplitPosition(2**32 - 1, 2**40, 2**41, True)]
    positions[1:1] = [SplitPosition(1, 7, 3, done, Cursor("thé", b"\0" * 1024, 4)) for done in (False, True)]
    assert unpack_positions(pack_positions(positions)) == positions
    assert [position.end for position in positions] == [5, 10, 10, 3 * 2**40]
    assert unpack_positions(b"") == []


def test_a_traffic_of_no_whole_entries_or_of_too_many_is_not_read() -> None:
    one = pack_traffic([PeerRows(0, 1, 1)])
    many = one * (2 * limits.TRAFFIC_ENTRIES_MAX)

    def back(traffic: bytes) -> ControlMessage:
        made = TaskReleased(attempt=ATTEMPT, traffic=one).model_copy(update={"traffic": traffic})
        return unpack_message(pack_message(AttemptReport(term=1, facts=[made])))

    assert back(many) == AttemptReport(term=1, facts=[TaskReleased(attempt=ATTEMPT, traffic=many)])
    for wrong in (one[:-1], many + one):
        with pytest.raises(RemoteProtocolError, match=r"facts\.0\.task_released\.traffic: "):
            back(wrong)
    assert TaskReport(attempt=ATTEMPT, counters=TaskCounters()).traffic == b""


def test_positions_of_no_whole_entries_are_not_read() -> None:
    for cursor in (None, Cursor("a", b"xyz", 4)):
        one = pack_positions([SplitPosition(0, 5, 3, cursor=cursor)])
        fact = SourcePositions(attempt=ATTEMPT, positions=one)
        made = AttemptReport(term=1, facts=[fact])
        assert unpack_message(pack_message(made)) == made
        for end in range(1, len(one)):
            cut = fact.model_copy(update={"positions": one[:end]})
            with pytest.raises(RemoteProtocolError, match=r"facts\.0\.source_positions\.positions: "):
                unpack_message(pack_message(made.model_copy(update={"facts": [cut]})))
