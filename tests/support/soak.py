"""How hard tests look: ``MINISHUFFLE_SOAK=1`` is for hours of a machine that does nothing else."""

from __future__ import annotations

import os

SOAK = os.environ.get("MINISHUFFLE_SOAK") == "1"
SOAK_EXAMPLES_MIN = 2_000


def examples(usual: int) -> int:
    """How many examples a test draws that needs another number of them than most."""
    return max(10 * usual, SOAK_EXAMPLES_MIN) if SOAK else usual
