"""The numbered job: what its source makes, what its log shows, and the connections that it cuts."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minishuffle.bench import numbered
from minishuffle.bench.numbered import Gap, Log, LogReader, Numbered, NumberedOutput, cut_connections
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.ids import Address
from minishuffle.operators.base import TaskContext

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
    sink = Log(str(path / "log"))
    sink.open(CONTEXT)
    for _, numbers in arrivals:
        sink.write([(number % numbered.KEYS, number) for number in numbers])
    sink.close()
    monkeypatch.setattr(numbered, "keyed_subtasks", lambda parallelism: np.arange(numbered.KEYS) % 2)
    return NumberedOutput(LogReader(str(path / "log")).read_on(), 0, RATE, parallelism=2)


def test_an_outage_lasts_until_a_record_of_after_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of subtask 1 record 9 was due before the failure at 10 ms; 15 is the first one after it."""
    output = logged(tmp_path, monkeypatch, [(9, [8]), (30, [9, 12]), (70, [15]), (80, [14, 17])])
    assert output.outage(10 * MILLISECOND, frozenset([0, 1])) == 60.0
    assert output.outage(10 * MILLISECOND, frozenset([0])) == 20.0
    with pytest.raises(ShuffleError, match="keyed subtask 1 has had no output"):
        output.outage(90 * MILLISECOND, frozenset([1]))


def test_a_gap_is_the_longest_silence_of_each_that_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = logged(tmp_path, monkeypatch, [(5, [2]), (6, [3]), (20, [4]), (50, [5]), (60, [6])])
    begin, end = 0, 100 * MILLISECOND
    even, odd = Gap(40.0, 20 * MILLISECOND, 0), Gap(50.0, 50 * MILLISECOND, 1)
    assert output.gaps(begin, end, frozenset()) == [even, odd], "edges of the time count"
    assert output.gaps(begin, end, frozenset([0])) == [odd]
    stalls = [(55 * MILLISECOND, 75 * MILLISECOND)]
    output = NumberedOutput(LogReader(str(tmp_path / "log")).read_on(), 0, RATE, stalls, parallelism=2)
    assert output.gaps(begin, end, frozenset()) == [
        Gap(35.0, 20 * MILLISECOND, 0),
        Gap(44.0, 6 * MILLISECOND, 1),
    ]


def test_records_are_counted_by_when_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = logged(tmp_path, monkeypatch, [(5, [2]), (6, [3, 4]), (20, [6]), (50, [5])])
    edges = [at * MILLISECOND for at in (0, 6, 20, 40, 60)]
    assert output.counts(frozenset([0]), edges).tolist() == [1, 1, 1, 0]
    assert output.counts(frozenset([0, 1]), edges).tolist() == [1, 2, 1, 1]


def test_victims_have_caught_up_when_their_records_are_as_late_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record n, which is due at n ms, is 10 ms late, but for those that are due from 1,000 to 1,119 ms, which
    come at 1,200; of subtask 1 that is all. It is calm from the step of 1,200 ms on, which has others too."""
    arrivals = [(number + 10, [number]) for number in range(0, 3_000)]
    arrivals[1_000:1_120] = [(1_200, list(range(1_000, 1_120)))]
    arrivals.sort()
    output = logged(tmp_path, monkeypatch, arrivals)
    at, until = 1_000 * MILLISECOND, 2_000 * MILLISECOND
    assert output.caught_up(at, frozenset([1]), until) == 0.25
    assert output.caught_up(at, frozenset([1]), at + 200 * MILLISECOND) is None
    assert output.caught_up(at + 1_000 * MILLISECOND, frozenset([0, 1]), until + 1_000 * MILLISECOND) == 0.0


def test_the_log_is_read_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are in its file after 20 ms at the latest, when more come."""
    clock = iter([0, 5 * MILLISECOND, 30 * MILLISECOND])
    monkeypatch.setattr(numbered.time, "monotonic_ns", lambda: next(clock) + MILLISECOND)
    sink = Log(str(tmp_path / "log"))
    sink.open(CONTEXT)
    sizes = []
    for number in range(3):
        sink.write([(number, number)])
        sizes.append(len(NumberedOutput(LogReader(str(tmp_path / "log")).read_on(), 0, RATE).numbers))
    sink.close()
    assert sizes[2] == 3


def read_whole(path: Path) -> Any:
    return np.fromfile(path, numbered.ENTRY)


@pytest.mark.parametrize("seed", range(20))
def test_a_log_that_is_read_on_is_what_it_is_when_it_is_read_whole(seed: int, tmp_path: Path) -> None:
    """At drawn cuts, also within entries; what was given away stays as it is."""
    random, path = Random(seed), tmp_path / "log"
    size = random.randrange(1, 400)
    entries = np.empty(size, numbered.ENTRY)
    entries["number"] = [random.randrange(size) for _ in range(size)]
    entries["time"] = range(size)
    data = entries.tobytes()
    cuts = sorted({random.randrange(len(data) + 1) for _ in range(random.randrange(1, 30))} | {len(data)})
    reader, found, begin = LogReader(str(path)), [], 0
    for cut in cuts:
        with path.open("ab") as file:
            file.write(data[begin:cut])
        begin = cut
        found.append(reader.read_on())
        assert np.array_equal(found[-1], read_whole(path))
        output, came = NumberedOutput(found[-1], 0, RATE), found[-1]["number"].tolist()
        count = random.randrange(size)
        assert output.missing(count) == len(set(range(count)).difference(came))
        assert output.duplicated == len(came) - len(set(came))
    assert all(np.array_equal(each, entries[: len(each)]) for each in found)


def test_what_was_read_of_a_log_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    entries = np.zeros(3, numbered.ENTRY)
    entries["number"] = [5, 6, 7]
    entries[:2].tofile(path)
    reader = LogReader(str(path))
    reader.read_on()
    changed = entries.copy()
    changed["number"][0] = 9
    changed.tofile(path)
    assert np.array_equal(reader.read_on(), entries)


@pytest.mark.parametrize(
    "numbers", [[], [5], [5, 9], [9, 8, 7]], ids=["emptied", "cut", "replaced", "longer"]
)
def test_a_log_that_is_another_one_is_an_error(numbers: list[int], tmp_path: Path) -> None:
    path = tmp_path / "log"
    entries = np.zeros(2, numbered.ENTRY)
    entries["number"] = [5, 6]
    entries.tofile(path)
    reader = LogReader(str(path))
    reader.read_on()
    other = np.zeros(len(numbers), numbered.ENTRY)
    other["number"] = numbers
    other.tofile(path)
    with pytest.raises(ShuffleError, match="no longer has entry 1"):
        reader.read_on()


def test_what_is_missing_is_known_once_later_records_of_all_subtasks_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of subtasks 0 and 1 the even and the odd numbers; record 3 is lost."""
    output = logged(tmp_path, monkeypatch, [(9, [0, 2, 1]), (10, [4, 6]), (11, [5])])
    assert (output.due_by(5 * MILLISECOND), output.has_passed(6), output.has_passed(5)) == (6, False, True)
    assert (output.missing(5), output.missing(3)) == (1, 0)
    assert (output.duplicated, output.disordered) == (0, 0)


def test_records_that_come_twice_or_behind_later_ones_of_their_key_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = [(9, [1, numbered.KEYS + 1, 2]), (10, [2, 1, 0])]
    output = logged(tmp_path, monkeypatch, arrivals)
    assert (output.duplicated, output.disordered, output.missing(3)) == (2, 1, 0)


def test_a_connection_is_cut_at_both_ends_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        there_address = Address(*server.getsockname())
        with (
            socket.create_connection(server.getsockname()) as cut,
            server.accept()[0] as far,
            socket.create_connection(other.getsockname()) as kept,
            other.accept()[0] as there,
        ):
            assert cut_connections(there_address) == 1
            assert (cut.recv(1), far.recv(1)) == (b"", b"")
            kept.sendall(b"x")
            assert there.recv(1) == b"x"
        assert cut_connections(there_address) == 0


FAR_SIDE = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1))"


def test_a_connection_of_another_process_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        command = [sys.executable, "-c", FAR_SIDE, str(address.port)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            server.accept()[0] as far,
        ):
            assert cut_connections(address, process.pid) == 1
            assert far.recv(1) == b""
            assert process.communicate(timeout=60)[0].strip() == "b''"


def test_sockets_that_the_kernel_does_not_hand_out_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered.ctypes, "get_errno", lambda: errno.EPERM)
    monkeypatch.setattr(numbered, "PIDFD_GETFD", -1)
    with socket.socket(), pytest.raises(UsageError, match="out of reach .* as root, or as its user"):
        cut_connections(Address("127.0.0.1", 1), os.getpid())
