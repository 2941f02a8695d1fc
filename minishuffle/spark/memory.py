"""What Python's garbage collector looks at in a Python of Spark's."""

from __future__ import annotations

import gc
from functools import cache

__all__ = ["settle_memory"]


@cache
def settle_memory() -> None:
    """(In a Python of Spark's.) Have collections pass over what is loaded by now, from the first call on.

    Spark collects everything after each use of a Python: that took as long as all else which a task that
    reads a million rows does in Python.
    """
    gc.freeze()
