"""The types of the package, checked beside other tests: mypy has one thread, and takes most of a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS_MAX = 600


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 30)
@pytest.mark.extra
def test_the_types_of_the_package_hold(repository: Path) -> None:
    command = [sys.executable, "-m", "mypy"]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
