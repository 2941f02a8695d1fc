"""What a launcher knows of the end of a worker process, with small programs in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minishuffle import postmortem
from minishuffle.postmortem import LOOK_SECONDS, Observation, observed, signal_name
from minishuffle.wire.requests import UserCall, WorkerEnded

READY = {"worker": 3, "epoch": 8, "pid": 1}
OPENS = """
import os, signal, sys
from minishuffle.worker.tasks.crashrecord import CrashRecord
from minishuffle.ids import AttemptId, SubtaskId
record = CrashRecord(int(sys.argv[-1]))
calls = record.claim(AttemptId(SubtaskId("j1", 2, 0), 5))
calls.enter(10); calls.leave(10); calls.enter(7)
"""
CALL = UserCall(job="j1", operator=2, index=0, attempt=5, position=10, rows=7)


def run(program: str) -> tuple[Observation, int]:
    """Run a program to its end, observed; its last argument is the descriptor."""
    with observed() as (observation, arguments, descriptors):
        assert arguments[0] == "--crash-record" and arguments[1] == str(descriptors[0])
        process = subprocess.Popen([sys.executable, "-c", program, *arguments], pass_fds=descriptors)
        observation.began(process.pid)
    return observation, process.wait()


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", {"signal": "SIGSEGV"}),
        ("os.kill(os.getpid(), signal.SIGKILL)", {"signal": "SIGKILL"}),
        ("os._exit(0)", {"code": 0}),
        ("os._exit(1)", {"code": 1}),
        ("sys.exit(3)", {"code": 3}),
    ],
)
def test_what_tasks_had_in_hand_is_read_after_the_death(last: str, fields: dict[str, object]) -> None:
    observation, code = run(OPENS + last)
    assert not observation.ended_by_itself(code)
    told = observation.report(READY, code)
    assert told == WorkerEnded.model_validate(
        {"worker": 3, "epoch": 8, "recorded": True, "calls": [CALL], **fields}
    )
    assert observation.report(None, code) is None, "it was not registered"
    observation.close()


@pytest.mark.parametrize("last", ["", "sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_process_that_had_said_that_it_ends_is_not_reported(last: str) -> None:
    observation, code = run(f"{OPENS}record.leave()\n{last}")
    assert observation.ended_by_itself(code)
    assert observation.report(READY, code) is None
    observation.close()


def test_of_one_that_has_written_nothing_the_exit_code_stands_for_that() -> None:
    observation, code = run("import sys; sys.exit(0)")
    assert observation.ended_by_itself(code) and not observation.ended_by_itself(1)
    assert observation.report(READY, 1) == WorkerEnded(worker=3, epoch=8, code=1)
    observation.close()
    assert Observation(None).ended_by_itself(0) and not Observation(None).ended_by_itself(-11)
    assert Observation(None).report(READY, -11) == WorkerEnded(worker=3, epoch=8, signal="SIGSEGV")


@pytest.mark.parametrize(("stopped", "hung"), [(False, True), (True, False)])
def test_one_that_does_not_react_is_said_to_hang_unless_it_is_stopped(stopped: bool, hung: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        observation = Observation(None)
        observation.began(process.pid)
        if stopped:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        observation.hangs()
        process.kill()
    end = observation.report(READY, process.wait())
    assert end == WorkerEnded(worker=3, epoch=8, signal="SIGKILL", hung=hung)


def test_without_memory_files_a_worker_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(postmortem.os, "memfd_create", refuse)
    with observed() as (observation, arguments, descriptors):
        assert (arguments, descriptors) == ([], ())
    assert observation.ended_by_itself(0)
    assert "cannot be recorded: [Errno 24] Too many open files" in caplog.text


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/a/b", "a/b/memory.events"),
        ("4:memory:/a/b\n0::/", "memory/a/b/memory.oom_control"),
        ("3:cpu,memory:/not/here\n", "memory/memory.oom_control"),
        ("0::/of/the/host", "memory.events"),
    ],
)
@pytest.mark.parametrize("rises", [True, False])
def test_the_memory_killer_is_seen_by_its_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, file: str, rises: bool
) -> None:
    proc, cgroups = tmp_path / "proc" / "77", tmp_path / "cgroup"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup)
    counter = cgroups / file
    counter.parent.mkdir(parents=True)
    counter.write_text("low 0\noom_kill_disable 0\noom 4\noom_kill 2\n")
    monkeypatch.setattr(postmortem, "PROC", proc.parent)
    monkeypatch.setattr(postmortem, "CGROUPS", cgroups)
    observation = Observation(None)
    observation.began(77)
    if rises:
        counter.write_text("low 0\noom_kill 3\n")
    told = observation.report(READY, -9)
    assert told is not None and (told.signal, told.out_of_memory) == ("SIGKILL", rises)


def test_without_a_counter_nobody_was_killed_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postmortem, "PROC", tmp_path)
    observation = Observation(None)
    observation.began(77)
    told = observation.report(READY, -9)
    assert told is not None and not told.out_of_memory


@pytest.mark.parametrize(("number", "name"), [(11, "SIGSEGV"), (9, "SIGKILL"), (40, "signal 40")])
def test_signals_have_names(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_what_the_memory_killer_did_long_before_explains_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers of a machine may be in one cgroup."""
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text("0::/")
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 2\n")
    monkeypatch.setattr(postmortem, "PROC", tmp_path)
    monkeypatch.setattr(postmortem, "CGROUPS", tmp_path)
    observation = Observation(None)
    observation.began(77)

    def is_out_of_memory() -> bool:
        told = observation.report(READY, -9)
        return told is not None and told.out_of_memory

    observation.look(100.0)
    counter.write_text("oom_kill 3\n")  # Another worker.
    observation.look(100.0 + LOOK_SECONDS)
    assert is_out_of_memory(), "it may be about to end"
    observation.look(99.9 + 2 * LOOK_SECONDS)
    assert is_out_of_memory()
    observation.look(100.0 + 2 * LOOK_SECONDS)
    assert not is_out_of_memory()
    counter.write_text("oom_kill 4\n")
    assert is_out_of_memory()
