"""How a worker sets its interpreter and allocator, each from a measurement."""

from __future__ import annotations

import gc
import sys
from typing import Final

import numpy as np

from minishuffle import limits

__all__ = ["tune_interpreter"]

WARM_BYTES: Final = 16 * limits.MIB
"""Below 32 MiB, above which glibc does not learn from a block."""
GC_THRESHOLD: Final = 1_000_000


def tune_interpreter(switch_interval: float) -> None:
    """Set this whole process up for task threads beside an event loop.

    * Switch interval (seconds): with eight busy threads the loop's lag had its 99th percentile at
      500 ms with the default of 5 ms, at 50 ms with 0.5 ms.
    * Allocator: freeing one large block raises glibc's thresholds for mmap and trim; without that,
      hashing strings took 3.5 times as long, most of it in page faults.
    * Garbage collector: rows that are unpacked by the thousand set it off again and again to find
      nothing; unpacking was a quarter faster without.
    """
    sys.setswitchinterval(switch_interval)
    np.empty(WARM_BYTES, dtype=np.uint8).fill(0)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 50, 50)
