"""Waits for something to happen in other threads and processes, with a bound; never for time to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

POLL_SECONDS = 0.02
SECONDS_MAX = 90.0
"""Guards against what never happens: less than any test may take, so that it is named."""


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS_MAX) -> Any:
    """The first true value of ``condition``.

    Raises:
        AssertionError: there was none within ``seconds``; names what did not happen.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(POLL_SECONDS)
    return found


async def comes_true(condition: Callable[[], Any], what: str, seconds: float = SECONDS_MAX) -> Any:
    """:func:`until` for what happens on this event loop."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        await asyncio.sleep(POLL_SECONDS / 2)
    return found
