"""Waits for something to happen in other threads and processes, with a bound; never for time to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

POLL_SECONDS, POLL_SECONDS_MAX = 0.02, 0.1
POLL_SHARE = 0.05
"""Of the time that has passed: who waits longer looks less often. A look takes a cluster and this process
some milliseconds of a processor."""
SECONDS_MAX = 90.0
"""Guards against what never happens: less than any test may take, so that it is named."""


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS_MAX) -> Any:
    """The first true value of ``condition``.

    Raises:
        AssertionError: there was none within ``seconds``; names what did not happen.
    """
    begun = time.monotonic()
    while not (found := condition()):
        passed = time.monotonic() - begun
        assert passed < seconds, f"{what} did not happen within {seconds} s"
        time.sleep(min(max(POLL_SECONDS, POLL_SHARE * passed), POLL_SECONDS_MAX))
    return found


async def comes_true(condition: Callable[[], Any], what: str, seconds: float = SECONDS_MAX) -> Any:
    """:func:`until` for what happens on this event loop."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        await asyncio.sleep(POLL_SECONDS / 2)
    return found
