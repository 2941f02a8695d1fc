"""What a process that is forked holds of its parent's sockets. Each parent is a program of its own, as a fork
takes along what the tests' process has open."""

import subprocess
import sys

import pytest

SECONDS_MAX = 30.0

BEGIN = """
import os, socket, subprocess, sys
from minishuffle.transport.forks import close_in_forks

here, there = socket.socketpair()
there.settimeout(20)
close_in_forks(here)
"""
FORK = """
pid = os.fork()
if pid == 0:
    child()
    os._exit(0)
"""
PEERS_SEE_THE_END = """
waits, ends = os.pipe()

def child():
    os.close(ends)
    os.read(waits, 1)
"""
AND_SO = """
there.sendall(b"to the parent")
assert here.recv(100) == b"to the parent"
here.sendall(b"not closed")
here.close()
assert there.recv(100) == b"not closed"
assert there.recv(100) == b"", "the child, which runs, has it open"
os.close(ends)
assert os.waitpid(pid, 0)[1] == 0
"""
OTHERS_STAY = """
again, _ = socket.socketpair()
close_in_forks(again)
number = again.fileno()
again.close()
own, peer = socket.socketpair()  # Has the number of what was closed.
assert own.fileno() == number
reads, writes = os.pipe()

def child():
    own.sendall(b"the user's")
    os.write(writes, b"as well")
    taken = os.open("/dev/zero", os.O_RDONLY)
    assert taken != here.fileno(), "the parent's object would close what was opened last"
    assert os.readlink(f"/proc/self/fd/{here.fileno()}") == os.devnull
    assert not os.get_inheritable(here.fileno())
    here.close()
    assert len(os.read(taken, 1)) == 1
    assert subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True).stdout == b"5\\n"
    own.close()
"""
AND_THEN = """
assert os.waitpid(pid, 0)[1] == 0
own.close()
os.close(writes)
assert peer.recv(100) == b"the user's" and peer.recv(100) == b""
assert os.read(reads, 100) == b"as well"
"""
NO_DESCRIPTOR_LEFT = """
import resource

def child():
    assert os.path.samestat(os.fstat(here.fileno()), os.stat(os.devnull))

highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
"""


@pytest.mark.parametrize(
    "program",
    [
        PEERS_SEE_THE_END + FORK + AND_SO,
        OTHERS_STAY + FORK + AND_THEN,
        NO_DESCRIPTOR_LEFT + FORK + "assert os.waitpid(pid, 0)[1] == 0",
    ],
    ids=["peers see the end", "others stay", "no descriptor left"],
)
def test_a_fork_closes_what_was_registered_and_nothing_else(program: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert (ran.returncode, ran.stderr) == (0, "")
