"""Programs that are loaded ahead of need, so that the modules they import are there when a task starts."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import cloudpickle

from minishuffle.plan.programs import open_program
from minishuffle.worker.interpreter import compete

__all__ = ["ProgramLoader"]

_log = logging.getLogger("minishuffle.worker")


class ProgramLoader:
    """Opens programs, each job's in a thread of its own, and keeps nothing of them but what Python keeps:
    the imported modules."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._loaded: set[str] = set()
        self._has_arrow = False
        """Arrow is loaded, or about to be."""

    @property
    def loaded(self) -> int:
        """Jobs whose programs have been opened, as far as that went."""
        return len(self._loaded)

    @property
    def threads(self) -> list[threading.Thread]:
        """Threads that have not ended."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return self._threads

    def load(self, job: str, programs: Sequence[bytes]) -> None:
        """Begin to load the programs of a job; returns at once."""
        self._begin(partial(self._load, job, programs), f"{job}:load")

    def load_arrow(self) -> None:
        """Begin to load what the first snapshot of a task would wait for; returns at once."""
        if not self._has_arrow:
            self._has_arrow = True
            self._begin(_load_arrow, "load Arrow")

    def _begin(self, load: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=load, name=name, daemon=True)
        thread.start()
        self._threads = [*self.threads, thread]

    def forget(self, job: str) -> None:
        """The job has ended."""
        self._loaded.discard(job)

    def _load(self, job: str, programs: Sequence[bytes]) -> None:
        compete()
        _load(job, programs)
        self._loaded.add(job)


def _load(job: str, programs: Sequence[bytes]) -> None:
    failed = False
    loads: list[Callable[[], object]] = [
        partial(open_program, program, cloudpickle.loads) for program in programs
    ]
    for load in (*loads, _load_arrow):
        try:
            load()
        except Exception as error:  # whatever user code raises; the task that needs it reports it
            if not failed:
                _log.warning("programs of job %s cannot be loaded ahead of need", job, exc_info=error)
            failed = True


def _load_arrow() -> None:
    """Have pyarrow import pandas, if both are there: it does so for its first array, and that takes half a
    second, which the first batch of a task would wait for, or its first snapshot."""
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        arrow.array([0])
