"""An init in front of a worker or coordinator that is the first process of its container.

The kernel gives every process whose parent has ended to number 1 of the container, and it stays a zombie
until that one waits for it. A worker cannot wait for just any child: it would take the exit codes that its
user's functions wait for. So number 1 forks, the copy is the worker, and number 1 waits for whatever ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Final, NoReturn

__all__ = ["run_behind_init"]

PASSED_ON: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
HEARD: Final = frozenset({*PASSED_ON, signal.SIGCHLD})


def run_behind_init() -> None:
    """Return in a copy of this process, if it has number 1, and at once if it has not; before any thread is
    started. Number 1 passes signals on to the copy and ends as it does."""
    if os.getpid() != 1:
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # None is lost between here and the loop below.
    if child := os.fork():
        _serve(child)
    _come_to_the_front()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _come_to_the_front() -> None:
    """Have Ctrl-C in the terminal reach this process alone: number 1 would pass on another one."""
    os.setpgid(0, 0)
    ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):  # There is no terminal.
            os.tcsetpgrp(0, os.getpid())
    finally:
        signal.signal(signal.SIGTTOU, ignored)


def _serve(child: int) -> NoReturn:
    while True:
        number = signal.sigwait(HEARD)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):  # It has just ended.
                os.kill(child, number)
            continue
        # One signal may stand for many that have ended.
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)
