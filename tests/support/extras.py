"""Tests that need more than requirements.lock: Spark, Java, Chromium, npm, Prometheus, or tools of Linux.

They carry the marker ``extra``, by which ``make test-fast`` leaves them out; the end of the run says how
many. A file whose ``pytestmark`` begins with it may import PySpark: where that is not installed, the file is
read instead of imported, so that its tests are counted all the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FIXTURES", "ReadAlone", "mark_by_fixture", "register", "stand_in"]

FIXTURES = frozenset({"new_jvm", "own_jvm", "spark", "prometheus_binaries"})
"""Whatever asks for one of these needs more."""
WHOLE_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.extra\b", re.MULTILINE)
MARKER = re.compile(r"pytest\.mark\.(alone|slow|soak)\b")
"""Those by which tests are left out."""
OUTPUT = "extra_tests_left_out"
"""The name by which xdist hands a process's tests to the one that started it."""


class LeftOut:
    """A plugin: the tests that were left out, by function, in this process and in those that it started."""

    def __init__(self, config: pytest.Config) -> None:
        self._found: set[str] = set()
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._found |= {
            item.nodeid.partition("[")[0]
            for item in items
            if item.get_closest_marker("extra") and not item.get_closest_marker("soak")
        }

    def pytest_sessionfinish(self) -> None:
        if self._output is not None:
            self._output[OUTPUT] = sorted(self._found)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._found |= set(getattr(node, "workeroutput", {}).get(OUTPUT, ()))  # One that died has none.

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._found:
            terminalreporter.write_line(
                f"left out: {len(self._found)} test functions that need more than requirements.lock "
                "(Spark, Java, Chromium, npm, Prometheus, tools of Linux); make test runs them"
            )


class ReadAlone(pytest.File):
    """A file of tests that cannot be imported here: one item for each function in it that is a test."""

    def collect(self) -> Iterator[pytest.Item]:
        self.add_marker("extra")
        for each in ast.parse(self.path.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_"):
                test = NotHere.from_parent(self, name=each.name)
                for marker in MARKER.findall(" ".join(map(ast.unparse, each.decorator_list))):
                    test.add_marker(marker)
                yield test


class NotHere(pytest.Item):
    """A test that fails if it is run all the same."""

    def runtest(self) -> None:
        pytest.fail("this test needs Spark: run scripts/bootstrap --tests", pytrace=False)


def stand_in(path: Path, parent: pytest.Collector) -> ReadAlone | None:
    """For a file of which all tests need more, where PySpark is not installed."""
    if find_spec("pyspark") is None and WHOLE_FILE.search(path.read_text(encoding="utf-8")):
        return ReadAlone.from_parent(parent, path=path)
    return None


def mark_by_fixture(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("extra")


def register(config: pytest.Config) -> None:
    if "not extra" in config.option.markexpr:
        config.pluginmanager.register(LeftOut(config), "extra tests")
