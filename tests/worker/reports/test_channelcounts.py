"""The table of rows exchanged with peers. What attempts count in it is in ``test_tasks``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from minishuffle import limits
from minishuffle.exchange.subpartition import PipelinedView
from minishuffle.wire.packed import PeerRows, unpack_traffic
from minishuffle.worker.reports.channelcounts import Traffic


def view_of(rows: int, *, current: bool) -> PipelinedView:
    return cast(PipelinedView, SimpleNamespace(current=current, rows_sent=rows, rows_skipped=0))


def test_former_peers_without_an_entry_of_their_own_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "TRAFFIC_PEERS_MAX", 2)
    traffic = Traffic()
    for index in range(4):
        traffic.sends((7, index, 1), view_of(10**index, current=False))
    found = [PeerRows(7, 0, 1, 1), PeerRows(7, 1, 1, 10), PeerRows(7, 0, 0, 1_100)]
    assert unpack_traffic(traffic.table()) == unpack_traffic(traffic.table()) == found


def test_each_peer_that_is_attached_has_an_entry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRAFFIC_PEERS_MAX", 2)
    traffic = Traffic()
    for index in range(4):
        traffic.sends((7, index, 1), view_of(10**index, current=True))
    found = [PeerRows(7, index, 1, 10**index) for index in range(4)]
    assert unpack_traffic(traffic.table()) == found
