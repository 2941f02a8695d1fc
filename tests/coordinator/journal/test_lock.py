"""One coordinator at a time for a journal: locks of real processes, and a coordinator that answers or not."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minishuffle.config import CoordinatorPlace, write_coordinator
from minishuffle.coordinator.journal import lock
from minishuffle.coordinator.journal.lock import sole_coordinator
from minishuffle.errors import AuthenticationError, PeerLost, ResourceExhausted, UsageError
from minishuffle.ids import Address
from minishuffle.wire.requests import ClusterStatus, GetStatus

HOME = Address("127.0.0.1", 8471)
HOLDS = """
import sys
from pathlib import Path
from minishuffle.coordinator.journal.lock import sole_coordinator
with sole_coordinator(Path(sys.argv[1]), "blue", b"s", take_over=False):
    print("holds", flush=True)
    sys.stdin.read()
"""


def start(directory: Path, *, take_over: bool = False) -> Any:
    return sole_coordinator(directory, "blue", b"s", take_over=take_over)


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock."""
    command = [sys.executable, "-c", HOLDS, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


def test_one_that_holds_the_lock_is_named_and_its_end_frees_it_however_it_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        for where in ("", f", {HOME}"):
            with pytest.raises(ResourceExhausted) as refused, start(tmp_path):
                pass
            assert str(refused.value) == (
                f"a coordinator runs with {tmp_path} already (pid {process.pid}{where}): leave it, or have "
                "this one take its place with --take-over"
            )
            write_coordinator(tmp_path, CoordinatorPlace(HOME, 1, handed_over=True))  # Where it was last.
        process.kill()
        process.wait()
        with start(tmp_path):
            assert (tmp_path / "journal.lock").read_text() == f"{os.getpid()}\n"


def test_one_that_takes_over_has_the_lock_from_then_on(tmp_path: Path) -> None:
    with holder(tmp_path), start(tmp_path, take_over=True):
        with pytest.raises(ResourceExhausted, match=rf"\(pid {os.getpid()}\)"), start(tmp_path):
            pass
        with start(tmp_path, take_over=True):
            pass
        with start(tmp_path):
            assert sorted(each.name for each in tmp_path.iterdir()) == ["journal.lock"]


class Answers:
    """Stands for the client of the coordinator at the recorded address."""

    def __init__(self, hello: Exception | None, status: Any = None) -> None:
        self.hello = hello
        self.status = status

    def __call__(
        self, address: Address, identity: Any, secret: bytes, timeout: float, *, tls: object
    ) -> Answers:
        assert (address, identity.cluster, secret, timeout) == (HOME, "blue", b"s", 2.0)
        if self.hello is not None:
            raise self.hello
        return self

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def request(self, message: GetStatus) -> Any:
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


def status(term: int) -> ClusterStatus:
    return ClusterStatus(cluster="blue", version="1", pid=77, term=term, web_port=0, workers=[], jobs=[])


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (Answers(None, status(3)), f"pid 77, {HOME}"),
        (Answers(None, PeerLost("busy")), f"{HOME}"),
        (Answers(None, status(4)), ""),
        (Answers(PeerLost("refused")), ""),
        (Answers(AuthenticationError("another secret")), ""),
    ],
    ids=["answers", "says hello", "another one", "nobody", "one with another secret"],
)
def test_where_there_is_no_lock_the_one_on_record_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Answers, found: str
) -> None:
    monkeypatch.setattr(lock, "BlockingControlClient", answers)
    write_coordinator(tmp_path, CoordinatorPlace(HOME, 3))
    if found:
        with pytest.raises(ResourceExhausted) as refused, start(tmp_path):
            pass
        assert str(refused.value).startswith(
            f"a coordinator runs with {tmp_path} already ({found}): leave it"
        )
    else:
        with start(tmp_path):
            pass
    with start(tmp_path, take_over=True):
        pass


def test_one_that_has_handed_over_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BlockingControlClient", Answers(None, status(3)))
    write_coordinator(tmp_path, CoordinatorPlace(HOME, 3, handed_over=True))
    with start(tmp_path):
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    for take_over in (False, True):
        with start(tmp_path, take_over=take_over):
            (record,) = caplog.records
            assert record.message == (
                f"the file system of {tmp_path}/journal.lock has no locks (No locks available): a second "
                "coordinator is refused only if this one answers it, and else takes its place"
            )
        caplog.clear()


def test_a_lock_that_cannot_be_written_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "journal.lock").mkdir()
    for take_over in (False, True):
        with (
            pytest.raises(UsageError, match="cannot write .*journal.lock: .*--state-dir"),
            start(tmp_path, take_over=take_over),
        ):
            pass
