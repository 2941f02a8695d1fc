"""How a worker sets its interpreter, allocator and threads, each from a measurement."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from minishuffle import limits

__all__ = [
    "GarbageClock",
    "collect_garbage",
    "compete",
    "keep_freed_memory",
    "pass_over_modules",
    "tune_interpreter",
]

_log = logging.getLogger("minishuffle.worker")

LARGE_BYTES: Final = 16 * limits.MIB
"""Below 32 MiB, above which glibc does not learn from a block."""
GC_THRESHOLD: Final = 1_000_000
_loop_waits = False
"""The loop's thread has a scheduling policy that other threads must not inherit."""
_modules = 0
"""How many were imported when the collector was last told to pass over what is there."""


def tune_interpreter(switch_interval: float, *, lets_tasks_finish: bool) -> None:
    """Set this whole process up for task threads beside an event loop.

    * Switch interval (seconds): with eight busy threads the loop's lag had its 99th percentile at
      500 ms with the default of 5 ms, at 50 ms with 0.5 ms.
    * Allocator: see :func:`keep_freed_memory`. Without it hashing strings took 3.5 times as long, most
      of it in page faults.
    * Garbage collector: rows that are unpacked by the thousand set it off again and again to find
      nothing; unpacking was a quarter faster without. So what a task held must go without it, see ``Chain``;
      for cycles in the user's code there is :func:`collect_garbage`.
    * The calling thread, the loop's, if it ``lets_tasks_finish``: see :func:`_wait_for_slices`.
    """
    sys.setswitchinterval(switch_interval)
    if lets_tasks_finish:
        _wait_for_slices()
    keep_freed_memory()
    pass_over_modules()
    gc.set_threshold(GC_THRESHOLD, 50, 50)


def _wait_for_slices() -> None:
    """Have the calling thread, the loop's, wait for the end of another thread's time slice when it wakes,
    rather than take the processor from it at once. On Linux; elsewhere nothing happens.

    A task's thread has the interpreter's lock, for which the loop then has to wait, or is in a compiled loop,
    whose vectors have left the processor's cache when it goes on. On two cores a keyed sum had 1.1 to 1.2
    times the rate, and at 100,000 records a second these took less time (the median 0.33 instead of 0.47 ms).
    Under more load than the processors bear the median was 13 ms instead of 2: each hop waits for a slice of
    3 or 4 ms.
    """
    global _loop_waits
    if not hasattr(os, "SCHED_BATCH"):
        return
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else somebody chose another one
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _loop_waits = True
    except OSError as error:  # a container may forbid it, and gVisor does not know it
        _log.warning(
            "the loop takes the processor from tasks: the system refuses the policy SCHED_BATCH (%s); "
            "set loop_lets_tasks_finish to false to be spared this line",
            error,
        )


def compete() -> None:
    """Let the calling thread, not the loop's, preempt others when it wakes. A thread inherits the loop's
    policy, which does not preempt. With this policy, eight computing threads made the loop wait in turn for
    them and for the interpreter lock: it was silent for 13 s."""
    if _loop_waits:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def collect_garbage(*, settled: bool) -> None:
    """Give back what functions of ended jobs kept in reference cycles. Holds the whole process up: for a
    moment when no task runs.

    Later calls pass over what is left with the modules that a job imported, if it is ``settled``: no thread
    runs a user's code, whose objects would stay. With pyarrow.compute and pandas each call took 12 ms.
    """
    gc.collect()
    if settled:
        pass_over_modules()


def pass_over_modules() -> None:
    """Let the garbage collector ignore all present objects, if there are more modules than ever before.
    Modules stay as long as the process, and hold most of its objects. Other present objects are no longer
    found if they are or become garbage in cycles."""
    global _modules
    if len(sys.modules) > _modules:
        _modules = len(sys.modules)
        gc.freeze()


class GarbageClock:
    """How long Python's garbage collector has held this process up, since this was made and until it closes.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._now = now
        self._began: float | None = None
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        """Called by the interpreter, on the thread that collects; no other one runs Python meanwhile."""
        if phase == "start":
            self._began = self._now()
        elif self._began is not None:
            self.seconds += self._now() - self._began
            self._began = None

    def close(self) -> None:
        """Idempotent."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed large blocks, instead of returning it and faulting it in again.

    Freeing one large block raises two thresholds: the block size above which glibc uses mmap
    (``M_MMAP_THRESHOLD``), and the free memory above which it returns memory (``M_TRIM_THRESHOLD``). Other
    allocators ignore this.
    """
    np.empty(LARGE_BYTES, dtype=np.uint8)
