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

SECONDS_MAX = 600
RIGHT, WRONG = "tests/support/typedjobs.py", "tests/support/wrongjobs.py"
RECIPES = "minishuffle/examples/recipes"

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(SECONDS_MAX + 30)]


def expected(repository: Path) -> set[tuple[str, int]]:
    """Files and lines that are marked as wrong; there are some."""
    lines = (repository / WRONG).read_text(encoding="utf-8").splitlines()
    marked = {(WRONG, number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert marked
    return marked


def checked(repository: Path, *command: str) -> str:
    """What a checker prints, which finds errors."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=repository,
        env={**os.environ, "MYPYPATH": "tests"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_the_types_of_the_package_and_of_jobs_hold_for_mypy(repository: Path) -> None:
    modules = ("-p", "minishuffle", "-m", "support.typedjobs", "-m", "support.wrongjobs")
    printed = checked(repository, "mypy", *modules)
    found = [line.split(":", 3) for line in printed.splitlines() if ": error:" in line]
    assert {(file, int(line)) for file, line, _, _ in found} == expected(repository), printed


def test_the_types_of_jobs_hold_for_pyright(repository: Path) -> None:
    command = ("pyright", "--outputjson", "--pythonpath", sys.executable, RIGHT, WRONG, RECIPES)
    printed = checked(repository, *command)
    found = json.loads(printed)["generalDiagnostics"]
    places = {
        (str(Path(each["file"]).relative_to(repository)), each["range"]["start"]["line"] + 1)
        for each in found
    }
    assert places == expected(repository), printed
