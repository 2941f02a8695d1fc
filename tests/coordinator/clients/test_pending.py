"""Requests that wait: who waits for what, until when, and that there is one table of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from minishuffle import limits
from minishuffle.coordinator.clients.pending import Pending, PendingRequests
from minishuffle.coordinator.instructions import Reply
from minishuffle.errors import ResourceExhausted, UsageError
from minishuffle.wire.requests import Accepted, Failure
from support.sources import PACKAGE, modules

NO_TABLE = {
    "Reply": "an answer",
    "Submission": "its job starts once it is in the journal, whether or not the client is still there",
}
"""What has a link and a number of a request, and does not wait for an answer."""


@dataclass(slots=True, eq=False)
class Read(Pending):
    """Something to be read."""


@dataclass(slots=True, eq=False)
class Written(Pending):
    """Something to be written."""


@pytest.fixture
def pending() -> PendingRequests:
    return PendingRequests()


def test_a_request_waits_among_its_kind_until_it_is_answered(pending: PendingRequests) -> None:
    one, two, other = (pending.add(each) for each in (Read(2, 1), Read(1, 2), Written(1, 3)))
    assert (pending.of(Read), pending.of(Written), pending.of(Pending)) == ([one, two], [other], [])
    assert pending.next_deadline() is None
    assert pending.answer(one, Accepted()) == Reply(2, 1, Accepted())
    assert pending.refuse(two, UsageError("no")) == Reply(1, 2, Failure(code=UsageError.code, text="no"))
    late, soon = pending.add(Read(1, 2, deadline=9.0)), pending.add(Read(1, 3, deadline=2.0))
    pending.add(Written(1, 4, deadline=1.0))
    assert (pending.due(Read, 1.9), pending.due(Read, 2.0), pending.next_deadline()) == ([], [soon], 1.0)
    assert pending.due(Read, 9.0) == [late, soon]


def test_what_was_asked_for_a_request_is_open_as_long_as_that_waits_and_its_link_is_there(
    pending: PendingRequests,
) -> None:
    gone, stays = pending.add(Read(1, 1)), pending.add(Read(2, 1))
    pending.add(Written(1, 2))
    for ticket, by in ((1, gone), (2, stays), (3, gone), (4, None), (5, stays)):
        pending.expect(ticket, f"question {ticket}", by)
    pending.forget(1)
    assert (pending.of(Read), pending.of(Written)) == ([stays], [])
    found = [pending.question(1, str), pending.question(2, Read), pending.question(2, str)]
    assert found == [None, None, "question 2"]
    pending.close(2)
    assert pending.questions(str) == [(4, "question 4"), (5, "question 5")] and pending.of(Read) == [stays]
    pending.answer(stays, Accepted())
    assert pending.questions(str) == [(4, "question 4")]


def test_requests_are_bounded_by_link_and_kind_and_in_all(
    pending: PendingRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINK_REQUESTS_MAX", 2)
    for number in (1, 2):
        pending.require_room(Read, 1)
        pending.add(Read(1, number))
    with pytest.raises(ResourceExhausted, match="2 requests of this client wait for answers of workers"):
        pending.require_room(Read, 1)
    pending.require_room(Written, 1)
    assert pending.has_room(Read, 2, in_all=3) and not pending.has_room(Read, 2, in_all=2)


def test_there_is_no_second_table_of_requests_that_wait() -> None:
    """Whatever has the link and the number of a request is a :class:`Pending`, or is listed; and only the
    one table of these forgets a link."""
    found = [
        (module.name, node.name, [each for each in node.body if isinstance(each, ast.AnnAssign)])
        for module in modules(PACKAGE)
        if module.name.startswith("coordinator/")
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    ]
    assert len(found) > 50
    requests = {
        name for _, name, fields in found if {"link", "request"} <= {ast.unparse(f.target) for f in fields}
    }
    assert requests == {"Pending", *NO_TABLE}
    forgets = [
        module.name
        for module in modules(PACKAGE)
        if module.name.startswith("coordinator/")
        for node in module.nodes
        if isinstance(node, ast.FunctionDef) and node.name == "forget" and "link" in ast.unparse(node.args)
    ]
    assert forgets == ["coordinator/clients/pending.py"]
