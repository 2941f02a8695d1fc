"""A plugin of pytest that writes down class and text of the package's errors that tests expect.

``python -m pytest -p support.refusals --refusals=FILE tests/api tests/connectors``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minishuffle.errors import ShuffleError
from support.ledgerparts import failure

FOUND: set[str] = set()


class Watched:
    """What ``pytest.raises`` gives, whose error is written down."""

    def __init__(self, raises: Any) -> None:
        self._raises = raises

    def __enter__(self) -> Any:
        return self._raises.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        expected = self._raises.__exit__(kind, error, trace)
        if expected and isinstance(error, ShuffleError):
            FOUND.add(json.dumps(failure(error)))
        return expected


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refusals", help="the file to write to")


def pytest_configure(config: pytest.Config) -> None:
    raises = pytest.raises

    def watched(*args: Any, **options: Any) -> Any:
        made = raises(*args, **options)
        return Watched(made) if len(args) == 1 else made

    pytest.raises = watched  # type: ignore[assignment]


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(session.config.getoption("--refusals")).write_text("".join(f"{line}\n" for line in sorted(FOUND)))
