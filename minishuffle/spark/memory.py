"""What garbage collector and allocator do in a Python of Spark's."""

from __future__ import annotations

import gc
from functools import cache

from minishuffle.worker.interpreter import keep_freed_memory

__all__ = ["settle_memory"]


@cache
def settle_memory() -> None:
    """(In a Python of Spark's.) Have collections pass over what is loaded by now, from the first call on.

    Spark collects everything after each use of a Python: that took as long as all else which a task that
    reads a million rows does in Python. Each element that is read has memory of its own: faulting it in
    again and again was a quarter of what such a task does in Python.
    """
    keep_freed_memory()
    gc.freeze()
