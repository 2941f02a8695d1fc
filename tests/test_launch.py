import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minishuffle.config import ClusterSettings
from minishuffle.errors import PeerLost, ResourceExhausted, ShuffleError, UnknownName, UsageError
from minishuffle.launch import (
    Child,
    _pins,
    checked_settings,
    settings_flags,
    spawn,
    stop_children,
    wait_until_ready,
)

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"port": 1}', flush=True)
time.sleep(60)
"""
POLITE = "import sys; print('{}', flush=True); sys.stdin.read()"
SILENT = "import time; time.sleep(60)"


def python(directory: Path, program: str, name: str = "child") -> Child:
    out, log = directory / f"{name}.out", directory / f"{name}.log"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr
        )
    return Child(name, process, out, log)


def test_a_child_that_ends_at_its_start_is_quoted(tmp_path: Path) -> None:
    child = spawn("worker-1", ["worker", "start", "--id", "many"], tmp_path)
    with pytest.raises(ShuffleError, match=r"worker-1 ended with code 2 .*\nminishuffle: .*--id.*many"):
        wait_until_ready(child, time.monotonic() + 30)
    stop_children([child], 1.0)


def test_the_ready_line_is_the_first_object_of_the_output(tmp_path: Path) -> None:
    child = python(tmp_path, "print('hi'); print(5); print('{\"port\": 7}'); print('more from the user')")
    assert wait_until_ready(child, time.monotonic() + 30) == {"port": 7} == child.ready
    stop_children([child], 1.0)


def test_a_child_that_says_nothing_in_time_is_an_error(tmp_path: Path) -> None:
    child = python(tmp_path, SILENT)
    with pytest.raises(ResourceExhausted, match=r"child \(pid \d+\) was not .*: .*, or .*written nothing\n"):
        wait_until_ready(child, time.monotonic())
    stop_children([child], 0.0)
    assert child.process.returncode is not None


def test_a_signal_goes_to_the_process_itself_and_to_no_other_of_its_number(tmp_path: Path) -> None:
    child = python(tmp_path, SILENT)
    child.send_signal(signal.SIGKILL)
    child.process.wait(30)
    child.send_signal(signal.SIGKILL)  # Nothing has that descriptor's number any more.
    stop_children([child], 0.0)
    child.send_signal(signal.SIGKILL)
    assert child.process.returncode == -signal.SIGKILL


def test_where_processes_have_no_descriptors_signals_go_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(pid)

    monkeypatch.setattr(os, "pidfd_open", refused)
    child = python(tmp_path, SILENT)
    child.send_signal(signal.SIGKILL)
    stop_children([child], 30.0)
    child.send_signal(signal.SIGKILL)
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_ends_when_its_input_does(tmp_path: Path) -> None:
    child = python(tmp_path, POLITE)
    wait_until_ready(child, time.monotonic() + 30)
    stop_children([child], 30.0)
    assert child.process.returncode == 0


def test_a_child_that_has_ended_cannot_be_detached_and_is_quoted(tmp_path: Path) -> None:
    child = python(tmp_path, "import sys; sys.exit('cannot go on')")
    child.process.wait()
    with pytest.raises(PeerLost, match=r"child \(pid \d+\) has ended already; look at .*\ncannot go on"):
        child.detach()
    stop_children([child], 0.0)  # Not held up by what could not be written.


def test_a_child_that_ignores_everything_is_killed(tmp_path: Path) -> None:
    child = python(tmp_path, STUBBORN)
    wait_until_ready(child, time.monotonic() + 30)
    stop_children([child], 0.05)
    assert child.process.returncode == -9


def test_the_tail_is_the_end_of_the_log(tmp_path: Path) -> None:
    child = python(tmp_path, "import sys; [print(i, file=sys.stderr) for i in range(100)]")
    child.process.wait(30)
    assert child.tail().splitlines() == [str(i) for i in range(80, 100)]
    stop_children([child], 0.0)


def test_the_tail_says_if_there_was_no_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = python(tmp_path, "")
    child.process.wait(30)
    monkeypatch.setattr("minishuffle.launch._has_room", lambda directory: False)
    assert child.tail() == f"there is no room left in {tmp_path}, where its output goes: make some"
    stop_children([child], 0.0)


def test_flags_carry_every_setting() -> None:
    flags = settings_flags(ClusterSettings(slots=3, use_uvloop=False))
    assert flags[flags.index("--slots") + 1] == "3"
    assert "--no-use-uvloop" in flags
    switches = [
        flag for flag in flags if flag in ("--no-use-uvloop", "--pin-workers", "--loop-lets-tasks-finish")
    ]
    assert len(flags) == 2 * len(ClusterSettings.model_fields) - len(switches)
    assert len(switches) == 3


def test_each_worker_has_a_processor_where_all_processors_have_equally_many() -> None:
    assert _pins(2, [0, 1]) == [0, 1]
    assert _pins(2, [3, 7]) == [3, 7], "those that this process may use"
    assert _pins(4, [0, 1]) == [0, 1, 0, 1]
    assert _pins(3, [0, 1]) == [None] * 3, "two of them would be slower than the other"
    assert _pins(1, [0, 1]) == [None], "nothing would run on the second processor"
    assert _pins(0, [0, 1]) == [], "the workers run elsewhere"


def test_bad_settings_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"no setting 'slot'; the settings are .*slots"):
        checked_settings(slot=1)
    with pytest.raises(UsageError, match=r"^setting slots: .*greater than or equal to 1 \(got 0\)$"):
        checked_settings(slots=0)
    with pytest.raises(UsageError, match="^setting heartbeat_timeout"):
        checked_settings(heartbeat_timeout=1.0, heartbeat_interval=1.0)
    with pytest.raises(UnknownName, match=r"absent\.toml does not exist"):
        checked_settings(tmp_path / "absent.toml")
