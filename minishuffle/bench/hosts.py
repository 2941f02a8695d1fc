"""Hosts that share nothing but a network: namespaces of this machine, whose links can be cut. Linux, as root.

A host that is cut off closes no connection: its packets are lost, and so are those for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from minishuffle.errors import ShuffleError, UsageError
from minishuffle.local import LocalCluster

__all__ = ["HostCluster", "Hosts"]

IP_SECONDS_MAX: Final = 10.0
RUN: Final = "/run"
"""Where ``ip`` has its namespaces; it is locked while one of the processes of this machine takes a subnet."""
NAMES: Final = re.compile(r"^minishuffle-(\d+)-\d+\b", re.MULTILINE)
"""Names of namespaces, with the id of the process that made them."""


class Hosts:
    """Network namespaces on one bridge, numbered from 0; this process, on the bridge itself, reaches all.

    Entering it makes them, and leaving it removes them. Those of a process that was killed are removed by the
    next one.

    Raises (on entry):
        UsageError: this process may not make any.
        ShuffleError: what ``ip`` says.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pid = os.getpid()
        self._subnet = ""

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            raise UsageError("hosts are network namespaces, which only root can make: run it as root")
        if shutil.which("ip") is None:
            raise UsageError("hosts are made with 'ip': install iproute2 ('apt-get install iproute2')")
        _remove_left_behind()
        try:
            self._make()
        except BaseException:
            _remove(self._pid)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _remove(self._pid)

    def _make(self) -> None:
        bridge = _bridge(self._pid)
        _ip("link", "add", bridge, "type", "bridge")
        with _alone():
            taken = _ip("-o", "-4", "address", "show")
            self._subnet = next(net for n in range(255) if (net := f"10.213.{n}") and f" {net}." not in taken)
            _ip("address", "add", f"{self._subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number in range(self._count):
            name, plug = self._name(number), self._plug(number)
            _ip("netns", "add", name)
            _ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", plug, "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def _name(self, number: int) -> str:
        return f"minishuffle-{self._pid}-{number}"

    def _plug(self, number: int) -> str:
        """The bridge's end of a host's cable."""
        return f"ms{self._pid:x}h{number}"

    # --- where processes run ---------------------------------------------------------------------

    def address(self, number: int) -> str:
        """The host's, on the network."""
        return f"{self._subnet}.{number + 1}"

    def command(self, number: int) -> list[str]:
        """What stands in front of a command that is to run on that host."""
        return ["ip", "netns", "exec", self._name(number)]

    # --- links -----------------------------------------------------------------------------------

    def cut(self, number: int) -> None:
        """Take the host off the network."""
        _ip("link", "set", self._plug(number), "down")

    def restore(self, number: int) -> None:
        """The host is on the network again."""
        _ip("link", "set", self._plug(number), "up")


class HostCluster(LocalCluster):
    """A :class:`LocalCluster` whose processes are on hosts of their own: the coordinator on host 0, worker n
    on host n.

    Raises (on entry):
        UsageError: see :class:`Hosts`.
    """

    def __init__(self, workers: int = 2, slots: int = 2, *, standby: int = 0, **settings: Any) -> None:
        super().__init__(workers, slots, standby=standby, **settings)
        self.hosts = Hosts(1 + workers + standby)

    def __enter__(self) -> HostCluster:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.hosts)
            self._start(self._count, self.hosts.address(0), self.hosts)
            stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self.hosts.__exit__(kind, error, traceback)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time is in here: two that look at once take the same subnet, which ``ip`` allows."""
    folder = os.open(RUN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _bridge(pid: int) -> str:
    return f"ms{pid:x}br"


def _ip(*arguments: str) -> str:
    """What ``ip`` prints.

    Raises:
        ShuffleError: it refuses.
    """
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IP_SECONDS_MAX, check=False)
    if done.returncode:
        raise ShuffleError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
    return done.stdout


def _remove(pid: int) -> None:
    """Whatever there is of the hosts of that process."""
    for plug in re.findall(rf"\b(ms{pid:x}h\d+)@", _ip("-o", "link", "show")):
        _ip("link", "delete", plug)  # first: with its namespace it goes some time later
    for found in NAMES.finditer(_ip("netns", "list")):
        if int(found[1]) == pid:
            _ip("netns", "delete", found[0])
    if f" {_bridge(pid)}: " in _ip("-o", "link", "show"):
        _ip("link", "delete", _bridge(pid))


def _remove_left_behind() -> None:
    for pid in {int(found[1]) for found in NAMES.finditer(_ip("netns", "list"))}:
        if not os.path.exists(f"/proc/{pid}"):
            _remove(pid)
