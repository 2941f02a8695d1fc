"""Requests that wait until it is known which workers there are."""

from __future__ import annotations

import pytest

from minishuffle import limits
from minishuffle.coordinator.postponed import PostponedRequests
from minishuffle.errors import ResourceExhausted
from minishuffle.wire.requests import GetStatus, SubmitJob

SUBMIT = SubmitJob(name="words", python="3.11", graph=b"")


def test_only_what_needs_workers_waits_and_in_its_order() -> None:
    postponed = PostponedRequests()
    assert not postponed.postpone(1, 1, GetStatus())
    assert postponed.postpone(1, 2, SUBMIT) and postponed.postpone(2, 1, SUBMIT)
    assert [each[:2] for each in postponed.take()] == [(1, 2), (2, 1)]
    assert postponed.take() == []


def test_what_a_client_that_left_had_asked_for_is_dropped() -> None:
    postponed = PostponedRequests()
    postponed.postpone(1, 1, SUBMIT)
    postponed.postpone(2, 1, SUBMIT)
    postponed.forget(1)
    assert [each[:2] for each in postponed.take()] == [(2, 1)]


def test_the_requests_of_one_link_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINK_REQUESTS_MAX", 2)
    postponed = PostponedRequests()
    for number in (1, 2):
        postponed.postpone(1, number, SUBMIT)
    with pytest.raises(ResourceExhausted, match="2 requests of this client wait"):
        postponed.postpone(1, 3, SUBMIT)
    assert postponed.postpone(2, 1, SUBMIT), "another client's may wait"
