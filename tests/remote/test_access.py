"""Requests of external clients while the coordinator is away."""

from __future__ import annotations

import pytest

from minishuffle.errors import PeerLost, UnknownName
from minishuffle.remote import access as module
from minishuffle.remote.access import Access
from minishuffle.wire.requests import Accepted, ListJobs


class Control:
    """A connection over which nothing comes before ``back``, and then what there is to say."""

    now = 0.0
    back = 3.0
    answer: Accepted | UnknownName = Accepted(job="j1")

    def __init__(self, *arguments: object, **more: object) -> None:
        self.arguments = arguments

    def __enter__(self) -> Control:
        if Control.now < Control.back:
            raise PeerLost("cannot connect")
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is open."""

    def request(self, message: object, timeout: float) -> Accepted:
        if isinstance(Control.answer, UnknownName):
            raise Control.answer
        return Control.answer


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> Access:
    def sleep(seconds: float) -> None:
        Control.now += seconds

    monkeypatch.setattr(Control, "now", 0.0)
    monkeypatch.setattr(module, "BlockingControlClient", Control)
    monkeypatch.setattr(module.time, "monotonic", lambda: Control.now)
    monkeypatch.setattr(module.time, "sleep", sleep)
    return Access("127.0.0.1", 1, "local", b"secret")


def test_it_asks_again_until_a_coordinator_answers(access: Access) -> None:
    assert access.request(ListJobs(), away_seconds=10.0) == Accepted(job="j1")
    assert Control.now == pytest.approx(3.0, abs=0.2)


def test_it_does_not_ask_for_ever_and_not_at_all_if_nobody_wants_to_wait(access: Access) -> None:
    with pytest.raises(PeerLost):
        access.request(ListJobs())
    assert Control.now == 0.0
    with pytest.raises(PeerLost):
        access.request(ListJobs(), away_seconds=2.0)
    assert Control.now == pytest.approx(2.0, abs=0.2)


def test_what_a_coordinator_refuses_is_not_asked_again(
    access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Control, "back", 0.0)
    monkeypatch.setattr(Control, "answer", UnknownName("no such job"))
    with pytest.raises(UnknownName):
        access.request(ListJobs(), away_seconds=10.0)
    assert Control.now == 0.0
