"""Programs that are loaded ahead of need, so that the modules they import are there when a task starts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import cloudpickle

__all__ = ["ProgramLoader"]

_log = logging.getLogger("minishuffle.worker")


class ProgramLoader:
    """Opens programs, each job's in a thread of its own, and keeps nothing of them but what Python keeps:
    the imported modules."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that have not ended."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return self._threads

    def load(self, job: str, programs: Sequence[bytes]) -> None:
        """Begin to load the programs of a job; returns at once."""
        thread = threading.Thread(target=_load, args=(job, programs), name=f"{job}:load", daemon=True)
        thread.start()
        self._threads = [*self.threads, thread]


def _load(job: str, programs: Sequence[bytes]) -> None:
    failed = False
    for program in programs:
        try:
            cloudpickle.loads(program)
        except Exception as error:  # whatever user code raises; the task that needs it reports it
            if not failed:
                _log.warning("programs of job %s cannot be loaded ahead of need", job, exc_info=error)
            failed = True
