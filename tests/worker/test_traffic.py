"""The table of rows exchanged with peers. What attempts count in it is in ``test_tasks``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from minishuffle import limits
from minishuffle.exchange.subpartition import PipelinedView
from minishuffle.wire.packed import PeerRows, unpack_traffic
from minishuffle.worker.traffic import Traffic


def test_peers_without_an_entry_of_their_own_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRAFFIC_PEERS_MAX", 2)
    traffic = Traffic()
    views = [
        cast(PipelinedView, SimpleNamespace(current=False, rows_sent=10**worker, rows_skipped=0))
        for worker in range(4)
    ]
    for worker, view in enumerate(views):
        traffic.sends((7, worker + 1, 1), view)
    found = [PeerRows(7, 1, 1, 1), PeerRows(7, 2, 1, 10), PeerRows(7, 0, 0, 1_100)]
    assert unpack_traffic(traffic.table()) == unpack_traffic(traffic.table()) == found
