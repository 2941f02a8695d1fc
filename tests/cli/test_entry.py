"""Ctrl-C while the command line is being imported, in processes of their own."""

import gc
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from minishuffle.cli.entry import importing

BEFORE = """
import importlib.abc, runpy, signal, sys, types, weakref

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "minishuffle.cli.main":
            class Thing: pass
            thing = Thing()
            # As the import system's own callbacks: what they raise is printed and lost.
            callback = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            del thing
            module = types.ModuleType(name)
            module.main = command
            sys.modules[name] = module
            return importlib.machinery.ModuleSpec(name, Given())

class Given(importlib.abc.Loader):
    def create_module(self, spec):
        return sys.modules[spec.name]
    def exec_module(self, module):
        pass

def command():
    print("the command runs", signal.getsignal(signal.SIGINT) is before)

before = signal.getsignal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""
STARTS = [
    "runpy.run_module('minishuffle', run_name='__main__')",
    "runpy.run_module('minishuffle.cli', run_name='__main__')",
    "from minishuffle.cli.entry import main; main()",
]


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("start", STARTS)
def test_ctrl_c_during_the_imports_ends_in_silence(start: str) -> None:
    done = python(f"{BEFORE}{start}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigint_that_was_ignored_stays_so() -> None:
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN); before = signal.SIG_IGN"
    done = python(f"{BEFORE}{ignored}\n{STARTS[-1]}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "the command runs True\n", "")


def test_the_command_has_ctrl_c_as_ever() -> None:
    quiet = "Interrupting.find_spec = lambda self, name, path=None, target=None: None"
    inside = "import minishuffle.cli.main; minishuffle.cli.main.main = command"
    done = python(f"{BEFORE}{quiet}\n{inside}\n{STARTS[-1]}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "the command runs True\n", "")


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("3", "3")])
def test_linear_algebra_has_one_thread_unless_somebody_wants_more(given: str | None, found: str) -> None:
    told = "" if given is None else f"os.environ[name] = '{given}'"
    before = f"import os; name = 'OPENBLAS_NUM_THREADS'; os.environ.pop(name, None)\n{told}"
    inside = "import minishuffle.cli.main as inner; inner.main = lambda: print(os.environ[name])"
    done = python(f"{before}\n{inside}\n{STARTS[-1]}")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{found}\n", "")


def test_the_console_script_begins_there(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"minishuffle": "minishuffle.cli.entry:main"}


def test_what_is_imported_is_nothing_that_the_garbage_collector_looks_at_again() -> None:
    """It stays so here too: otherwise each collection of the tests that follow would look at all tests."""
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(kept)
    with pytest.raises(ValueError), importing():
        raise ValueError
    assert gc.isenabled()
