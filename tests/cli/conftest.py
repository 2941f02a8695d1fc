import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minishuffle.cli.main import cli
from support.january import january, january_files  # noqa: F401  (fixtures)
from support.spark import spark  # noqa: F401  (a fixture)

Run = Callable[..., Result]
MAKES_NAMESPACES = os.geteuid() == 0 or os.environ.get("CI") == "true"
collect_ignore = [] if MAKES_NAMESPACES else ["test_firstprocess.py"]
"""Namespaces need root; where all tests are to run, those that make some say so if they cannot."""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees or touches a real cluster's state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("COORDINATOR", "CLUSTER", "STATE_DIR", "SECRET_FILE"):
        monkeypatch.delenv(f"MINISHUFFLE_{name}", raising=False)
    return tmp_path / "state" / "minishuffle" / "default"


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(cli, arguments, prog_name="minishuffle")
