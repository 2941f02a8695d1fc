"""The numbered job: what its source makes, what its log shows, and the connections that it cuts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minishuffle.bench import numbered
from minishuffle.bench.numbered import Log, Numbered, NumberedOutput, cut_connections
from minishuffle.dataflow.operators.base import TaskContext
from minishuffle.errors import ShuffleError

MILLISECOND = 1_000_000
RATE = 1_000.0
CONTEXT = TaskContext(job="j1", name="log", index=0, parallelism=1, attempt=1)


def test_the_source_makes_each_number_once_until_it_is_stopped(tmp_path: Path) -> None:
    source = Numbered(1e6, str(tmp_path / "stop"), str(tmp_path / "begin"))
    made: list[Any] = []
    for batch in source.read(0, 0):
        made += batch
        if len(made) > 5_000:
            (tmp_path / "stop").touch()
    assert made == [(number % numbered.KEYS, number) for number in range(len(made))]
    assert int((tmp_path / "begin").read_text()) > 0


def logged(path: Path, monkeypatch: pytest.MonkeyPatch, arrivals: list[tuple[int, list[int]]]) -> Any:
    """The log of these numbers, at these milliseconds; number n was due at n ms."""
    clock = iter([at * MILLISECOND for at, _ in arrivals])
    monkeypatch.setattr(numbered.time, "monotonic_ns", lambda: next(clock))
    sink = Log(str(path / "log.npz"))
    sink.open(CONTEXT)
    for _, numbers in arrivals:
        sink.write([(number % numbered.KEYS, number) for number in numbers])
    sink.close()
    monkeypatch.setattr(numbered, "keyed_subtasks", lambda: np.arange(numbered.KEYS) % 2)
    monkeypatch.setattr(numbered, "PARALLELISM", 2)
    return NumberedOutput(str(path / "log.npz"), 0, RATE)


def test_an_outage_lasts_until_a_record_of_after_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of subtask 1 record 9 was due before the failure at 10 ms; 15 is the first one after it."""
    output = logged(tmp_path, monkeypatch, [(9, [8]), (30, [9, 12]), (70, [15]), (80, [14, 17])])
    assert output.distinct == 6
    assert output.outage(10 * MILLISECOND, frozenset([0, 1])) == 60.0
    assert output.outage(10 * MILLISECOND, frozenset([0])) == 20.0
    with pytest.raises(ShuffleError, match="keyed subtask 1 has had no output"):
        output.outage(90 * MILLISECOND, frozenset([1]))


def test_a_gap_is_the_longest_silence_of_each_that_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = logged(tmp_path, monkeypatch, [(5, [2]), (6, [3]), (20, [4]), (50, [5]), (60, [6])])
    begin, end = 0, 100 * MILLISECOND
    assert output.gaps(begin, end, frozenset()) == [40.0, 50.0], "edges of the time count"
    assert output.gaps(begin, end, frozenset([0])) == [50.0]


def test_a_connection_is_cut_at_both_ends_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as cut,
            server.accept()[0] as far,
            socket.create_connection(other.getsockname()) as kept,
            other.accept()[0] as there,
        ):
            assert cut_connections(port) == 1
            assert (cut.recv(1), far.recv(1)) == (b"", b"")
            kept.sendall(b"x")
            assert there.recv(1) == b"x"
        assert cut_connections(port) == 0
