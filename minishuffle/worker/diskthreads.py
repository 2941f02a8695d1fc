"""Threads that wait for disks in place of the loop."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from minishuffle import limits
from minishuffle.errors import ResourceExhausted, ShuffleError, described
from minishuffle.worker.tasks.handoff import LoopInbox

__all__ = ["DiskThreads"]

_Found = TypeVar("_Found")
_log = logging.getLogger("minishuffle.worker")


class DiskThreads:
    """A few threads of a worker, which begin when they are needed first.

    Args:
        inbox: gets what they have read.
        name: of the threads.
    """

    def __init__(self, inbox: LoopInbox, name: str = "disk") -> None:
        self._inbox = inbox
        self._threads = ThreadPoolExecutor(limits.DISK_THREADS, name)
        self._files: deque[int] = deque()
        """To be closed."""
        self._closed = False

    def run(self, read: Callable[[], _Found], done: Callable[[_Found | ShuffleError], None]) -> None:
        """(Loop.) Have a thread call ``read``, and then the loop ``done`` with what it gave or raised."""

        def work() -> None:
            found: _Found | ShuffleError
            try:
                found = read()
            except ShuffleError as error:
                found = error
            except Exception as error:  # e.g. no memory: the waiting caller must get it
                _log.exception("a read from disk failed")
                found = ResourceExhausted(f"a read from disk failed: {described(error)}")
            self._inbox.post(done, found)

        try:
            self._threads.submit(work)
        except RuntimeError as error:  # there cannot be another thread, or the worker ends
            self._inbox.post(done, ResourceExhausted(f"nothing can be read from disk: {described(error)}"))

    def close_file(self, number: int) -> None:
        """(Any thread.) Close a file whose blocks may take long to be freed. Takes no lock: a collection of
        garbage may call it wherever memory is taken, within ``submit`` too."""
        self._files.append(number)  # before the look: see close
        if not self._closed:
            try:
                self._inbox.post(self._have_files_closed)
                return
            except RuntimeError:  # the loop has ended
                pass
        self._close_files()

    def _have_files_closed(self) -> None:
        """(Loop.)"""
        try:
            self._threads.submit(self._close_files)
        except RuntimeError:  # as above
            self._close_files()

    def _close_files(self) -> None:
        while self._files:
            try:
                number = self._files.popleft()
            except IndexError:  # another thread was faster
                return
            os.close(number)

    def close(self) -> None:
        """(Loop.) What is under way ends; nothing follows."""
        self._closed = True
        self._threads.shutdown(wait=False)
        self._close_files()
