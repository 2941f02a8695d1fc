"""Programs that are loaded ahead of need."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from minishuffle.plan.programs import ProgramSpec, pack_program
from minishuffle.worker.tasks.programcache import ProgramLoader
from support.waiting import until

SECONDS_MAX = 20.0


class Refuses:
    """Raises when it is opened."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


class Waits:
    """Opening it waits."""

    go = threading.Event()

    def __reduce__(self) -> tuple[object, tuple[float]]:
        return Waits.wait, (SECONDS_MAX,)

    @staticmethod
    def wait(seconds: float) -> None:
        Waits.go.wait(seconds)


def program_with(value: Any) -> bytes:
    return pack_program(ProgramSpec(source=value), cloudpickle.dumps)


def ended(loader: ProgramLoader) -> bool:
    for thread in loader.threads:
        thread.join(SECONDS_MAX)
    return loader.threads == []


def test_what_a_program_imports_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bought_in.py").write_text("def double(n):\n    return 2 * n\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import bought_in

    program = program_with(bought_in.double)
    monkeypatch.delitem(sys.modules, "bought_in")
    loader = ProgramLoader()
    loader.load("j1", [program])
    assert ended(loader)
    assert sys.modules.pop("bought_in").double(4) == 8


def test_a_job_counts_as_loaded_when_all_of_its_programs_were_opened() -> None:
    Waits.go.clear()
    loader = ProgramLoader()
    loader.load("j1", [program_with(1), program_with(Waits())])
    loader.load("j2", [program_with(Refuses())])
    for thread in loader.threads:
        if thread.name == "j2:load":
            thread.join(SECONDS_MAX)
    assert loader.loaded == 1, "what cannot be loaded is not waited for"
    Waits.go.set()
    assert ended(loader) and loader.loaded == 2
    loader.forget("j1")
    assert loader.loaded == 1


@pytest.mark.slow
@pytest.mark.parametrize("loads", ['load("j1", [program])', "load_arrow()"])
def test_pyarrow_loads_ahead_what_it_would_import_for_the_first_array(loads: str) -> None:
    program = f"""
import sys, threading
import cloudpickle, pyarrow
from minishuffle.plan.programs import ProgramSpec, pack_program
from minishuffle.worker.tasks.programcache import ProgramLoader
assert "pandas" not in sys.modules
program = pack_program(ProgramSpec(pyarrow.RecordBatch), cloudpickle.dumps)
loader = ProgramLoader()
loader.{loads}
for thread in loader.threads:
    thread.join(60)
before = set(sys.modules)
pyarrow.array([0])
print(set(sys.modules) - before)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "set()\n"


def test_a_program_that_cannot_be_loaded_is_logged_once_and_does_no_harm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    loader = ProgramLoader()
    refuses = program_with(Refuses())
    with caplog.at_level(logging.WARNING):
        loader.load("j1", [refuses, b"no pickle at all", program_with(Path)])
        assert ended(loader)
    assert [record.message for record in caplog.records] == [
        "programs of job j1 cannot be loaded ahead of need"
    ]
    assert "no number" in caplog.text


def test_a_program_that_is_slow_to_load_holds_nobody_up() -> None:
    Waits.go.clear()
    loader = ProgramLoader()
    loader.load("j1", [program_with(Waits())])
    (slow,) = loader.threads
    loader.load("j2", [program_with(1)])
    until(lambda: [*loader.threads] == [slow], "the end of the other one")
    Waits.go.set()
    assert ended(loader)
