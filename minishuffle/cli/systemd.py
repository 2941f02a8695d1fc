"""What a process tells systemd, if that has started it: that it is ready, and that its loop goes round
(``sd_notify(3)``, ``WatchdogSec=``).

A unit of ``Type=notify`` names a socket in the environment. The watchdog is fed by the event loop and by
nothing else: a process that is stopped, whose function holds the interpreter's lock, or whose disk does not
answer feeds it no more, and systemd kills it and starts another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from typing import Final

__all__ = ["Notifier"]

WATCHDOG_TIMEOUTS: Final = 4.0
"""Times ``heartbeat_timeout`` that systemd waits for the loop: by then the coordinator has declared a worker
lost."""
BEATS: Final = 4
"""In that time."""
_log = logging.getLogger("minishuffle.cli")


class Notifier:
    """What speaks to systemd; it does nothing if systemd has not started this process.

    Args:
        environ: its variables are taken out, so that no process that is started here takes them for its own.
        pid: of this process.
    """

    def __init__(self, environ: MutableMapping[str, str], pid: int) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        usec, of = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(pid))
        self._is_watched = bool(self._address and usec) and of == str(pid)

    def ready(self, loop: asyncio.AbstractEventLoop, heartbeat_timeout: float) -> None:
        """This process serves: have the watchdog wait as long as the setting says, and feed it."""
        seconds = WATCHDOG_TIMEOUTS * heartbeat_timeout
        if not self._is_watched:
            self._notify("READY=1")
            return
        self._notify(f"READY=1\nWATCHDOG_USEC={int(seconds * 1e6)}")

        def beat() -> None:
            self._notify("WATCHDOG=1")
            loop.call_later(seconds / BEATS, beat)

        beat()

    def _notify(self, text: str) -> None:
        if not self._address:
            return
        name = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)  # The loop waits for nobody.
                sender.sendto(text.encode(), name)
        except OSError as error:
            _log.warning("systemd is not told %r: %s", text, error.strerror or error)
