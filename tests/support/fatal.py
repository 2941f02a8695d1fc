"""What a process of the tests said when a signal ended it, at the end of the run, where it is read.

Python prints the stacks of all threads when it crashes (``faulthandler``), amid the progress of the other
processes and in front of a list of modules that hides them. Here each process that runs tests side by side
writes them to a file, and the one that started it shows the files.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

INPUT = "fatal_error_file"
"""The name by which xdist hands the file's path to a process."""
LINES_MAX = 80


class FatalErrors:
    """A plugin of the process that starts the others: one file for each."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="minishuffle-fatal-", ignore_cleanup_errors=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[INPUT] = str(Path(self._folder.name) / node.gateway.id)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for path in sorted(Path(self._folder.name).iterdir()):
            if lines := list(stacks(path.read_text(errors="replace"))):
                terminalreporter.section(f"{path.name} died")
                terminalreporter.write("\n".join(lines) + "\n")

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class FatalError:
    """A plugin of a process that another one started: its stacks go to the file that it was given."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w")  # noqa: SIM115, faulthandler writes to it when the process dies

    def pytest_sessionstart(self) -> None:
        """After pytest, which has them written among the output."""
        faulthandler.enable(self._file)

    def pytest_unconfigure(self) -> None:
        faulthandler.disable()
        self._file.close()


def stacks(text: str) -> Iterator[str]:
    """The first lines of what ``faulthandler`` wrote, without the list of modules behind it."""
    for line in text.splitlines()[:LINES_MAX]:
        if line.startswith("Extension modules:"):
            return
        yield line


def register(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    plugin = FatalErrors() if given is None else FatalError(given[INPUT])
    config.pluginmanager.register(plugin, "fatal errors")
