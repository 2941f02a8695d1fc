"""The folder ``deploy``, and the Prometheus binaries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.prometheus import fetched_binaries

MAKES_HOSTS = os.geteuid() == 0 or os.environ.get("CI") == "true"
collect_ignore = [] if MAKES_HOSTS else ["test_walkthrough.py"]
"""Network namespaces need root; where all tests are to run, those that make some say so if they cannot."""


@pytest.fixture(scope="session")
def prometheus_binaries() -> Path:
    """The folder with ``prometheus`` and ``promtool``, fetched once per machine; never skips."""
    return fetched_binaries()


@pytest.fixture(scope="session")
def deploy() -> Path:
    """The folder of what others run minishuffle with."""
    return Path(__file__).resolve().parents[2] / "deploy"
