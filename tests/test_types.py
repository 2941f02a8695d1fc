"""What type checkers find: in the package, in jobs that are right, and in jobs that are wrong.

Run beside other tests: mypy has one thread, and takes most of a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minishuffle.cli.new import write_project

SECONDS_MAX = 600
RIGHT, WRONG = "tests/support/typedjobs.py", "tests/support/wrongjobs.py"
RECIPES = "minishuffle/examples/recipes"
MODULES = ("support.typedjobs", "support.wrongjobs", "orders", "test_orders", "test_cluster")
"""The same files as mypy needs them, and those of a new project."""

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(SECONDS_MAX + 30)]


def expected(repository: Path) -> set[tuple[str, int]]:
    """Files and lines that are marked as wrong; there are some."""
    lines = (repository / WRONG).read_text(encoding="utf-8").splitlines()
    marked = {(WRONG, number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert marked
    return marked


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """As ``minishuffle new`` writes it."""
    write_project(tmp_path, "shop")
    return tmp_path / "shop"


def checked(repository: Path, project: Path, *command: str) -> str:
    """What a checker prints, which finds errors."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=repository,
        env={**os.environ, "MYPYPATH": f"tests:{project}"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_the_types_of_the_package_and_of_jobs_hold_for_mypy(repository: Path, project: Path) -> None:
    modules = [word for name in MODULES for word in ("-m", name)]
    printed = checked(repository, project, "mypy", "-p", "minishuffle", *modules)
    found = [line.split(":", 3) for line in printed.splitlines() if ": error:" in line]
    assert {(file, int(line)) for file, line, _, _ in found} == expected(repository), printed


def test_the_types_of_jobs_hold_for_pyright(repository: Path, project: Path) -> None:
    settings = project.with_name("pyrightconfig.json")
    *checks, tests = (
        os.path.relpath(repository / name, settings.parent) for name in (RIGHT, WRONG, RECIPES, "tests")
    )
    paths = {"include": [*checks, project.name], "extraPaths": [tests, project.name]}
    settings.write_text(json.dumps(paths), encoding="utf-8")
    command = ("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(settings))
    printed = checked(repository, project, *command)
    found = json.loads(printed)["generalDiagnostics"]
    places = {
        (each["file"].removeprefix(f"{repository}/"), each["range"]["start"]["line"] + 1)
        for each in found
        if each["severity"] == "error"
    }
    assert places == expected(repository), printed
