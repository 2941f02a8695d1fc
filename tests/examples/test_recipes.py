"""The recipes print what stands at their top, and the index lists them all.

Most of them share one cluster, which stands in for the one that each starts; some run as a user runs them.
"""

from __future__ import annotations

import ast
import logging
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import minishuffle
from minishuffle.examples import recipes
from minishuffle.local import LocalCluster

FOLDER = Path(recipes.__file__).parent
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
LINES_MAX = 80
"""Of a recipe, with its docstring: what somebody reads before copying it."""


def docstring(name: str) -> str:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    return ast.get_docstring(tree) or ""


def printed(name: str) -> str:
    """What the recipe says that it prints."""
    return textwrap.dedent(docstring(name).partition("\nPrints::\n\n")[2]) + "\n"


class Shared(LocalCluster):
    """A cluster that runs before a recipe enters it, and after."""

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    cluster = Shared(workers=2)
    LocalCluster.__enter__(cluster)
    yield cluster
    LocalCluster.__exit__(cluster, None, None, None)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("wider_resources")
def test_each_prints_what_it_says(
    name: str,
    shared: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the main program, on the cluster of all recipes."""
    wanted: list[dict[str, int]] = []

    def started(**arguments: int) -> LocalCluster:
        wanted.append(arguments)
        return shared

    monkeypatch.setattr(minishuffle, "LocalCluster", started)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert capfd.readouterr() == (printed(name), "")
    assert wanted == [{"workers": 2}]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_file_per_day", "process_function_with_timer"])
def test_a_copy_runs_anywhere(name: str, tmp_path: Path) -> None:
    shutil.copy(FOLDER / f"{name}.py", tmp_path / "my_job.py")
    command = [sys.executable, "my_job.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, printed(name), "")
    assert [path.name for path in tmp_path.iterdir()] == ["my_job.py"]


@pytest.mark.parametrize("name", RECIPES)
def test_each_can_be_read_at_a_glance(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    first, _, use = docstring(name).partition("\nPrints::")[0].partition("\n\n")
    assert "\n" not in first
    assert 1 <= len(use.strip().splitlines()) <= 5
    assert text.count("\n") <= LINES_MAX
    imported = set(re.findall(r"^(?:from|import) (minishuffle[\w.]*)", text, re.MULTILINE))
    assert imported == {"minishuffle"}


def test_the_index_lists_each() -> None:
    index = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[([^]]+)\]\(recipes/(\w+)\.py\) \|", index, re.MULTILINE)
    assert sorted(name for _, name in listed) == RECIPES
    assert all(title.replace(" ", "_") == name for title, name in listed)
