"""What a worker answers when a write, or a whole stream, is to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from minishuffle import limits
from minishuffle.api.stream import Table
from minishuffle.wire.clients import (
    BeginWrite,
    EndWrite,
    ExpectUpstream,
    UpstreamExpected,
    WriteBegun,
    WriteEnded,
)
from minishuffle.wire.messages import ControlMessage
from minishuffle.worker.external.clients import ExternalClients, ResultReaders

if TYPE_CHECKING:
    from conftest import Site

SCHEMA = pa.schema([("n", pa.int64())])


class Door:
    """The external of a worker that reads a stream without end in job j1."""

    def __init__(self, site: Site) -> None:
        self.answers: list[ControlMessage] = []
        self.term = 1
        term = lambda: self.term  # noqa: E731
        readers = ResultReaders(term, site.deployment, site.inbox, self.answers.append)
        self.external = ExternalClients(term, site.deployment, readers, self.answers.append)
        (self.task,) = site.deploy(Table.from_spark("orders", SCHEMA, bounded=False).to_count())

    def end(self, ticket: int, *partitions: int, last: bool = False) -> list[int] | None:
        """What is missing of the write; None: no answer."""
        fields: dict[str, Any] = {"write": "w", "partitions": list(partitions), "last": last}
        self.external.serve(
            EndWrite(term=1, job="j1", operator=0, index=0, task_attempt=1, ticket=ticket, **fields)
        )
        if not self.answers:
            return None
        answer = self.answers.pop()
        assert isinstance(answer, WriteEnded) and answer.ticket == ticket
        return answer.missing


async def test_a_task_that_has_finished_still_answers(site: Site) -> None:
    door = Door(site)
    assert door.end(1, 0) == [0]
    assert door.end(2, last=True) == []
    (outcome,) = await site.finish()
    assert outcome.state == "finished"
    assert door.end(3, last=True) == []
    assert door.end(4, 0) == [0]


async def test_a_task_that_is_told_to_stop_leaves_the_answer_to_the_end_of_its_job(site: Site) -> None:
    door = Door(site)
    door.task.paths.cancel()
    assert door.end(1, last=True) is None
    await site.finish()
    assert door.task.state == "canceled"
    assert door.end(2, last=True) is None


async def test_a_write_begins_where_the_task_runs(site: Site) -> None:
    door = Door(site)
    fields: dict[str, Any] = {"job": "j1", "operator": 0, "index": 0, "task_attempt": 1}
    begin = BeginWrite(term=1, ticket=1, write="w", partitions=3, **fields)
    door.external.serve(begin)
    assert door.answers == [WriteBegun(term=1, ticket=1)]
    door.answers.clear()
    assert door.end(2, 0, 1) == [0, 1]
    door.task.paths.cancel()
    door.external.serve(begin.model_copy(update={"ticket": 3}))
    assert not door.answers, "the end of the job is told to whoever waits"
    await site.finish()


async def test_nobody_is_let_into_a_task_that_has_finished(site: Site) -> None:
    door = Door(site)
    door.end(1, last=True)
    await site.finish()
    fields: dict[str, Any] = {"write": "w", "partition": 0, "attempt": 1}
    door.external.serve(
        ExpectUpstream(term=1, job="j1", operator=0, index=0, task_attempt=1, ticket=2, **fields)
    )
    (answer,) = door.answers
    assert isinstance(answer, UpstreamExpected) and answer.error is not None
    assert "does not run here any more" in answer.error.text


async def test_a_ticket_is_good_for_a_client_of_the_same_term_alone(site: Site) -> None:
    door = Door(site)

    def expect(term: int) -> None:
        door.term = term
        fields: dict[str, Any] = {"write": "w", "partition": 0, "attempt": term}
        door.external.serve(
            ExpectUpstream(term=term, job="j1", operator=0, index=0, task_attempt=1, ticket=2, **fields)
        )
        answer = door.answers[-1]
        assert isinstance(answer, UpstreamExpected) and answer.error is None and answer.term == term

    expect(1)
    assert door.external.refusal(2, 1) is None
    assert "client 2 is not expected" in (door.external.refusal(2, 2) or ""), "of a later coordinator"
    door.term = 2
    assert "client 2 is not expected" in (door.external.refusal(2, 1) or ""), "of a coordinator that is gone"
    expect(2)
    assert door.external.refusal(2, 2) is None
    assert "client 2 is not expected" in (door.external.refusal(2, 1) or "")
    door.end(3, last=True)
    await site.finish()


async def test_tickets_of_writers_that_never_come_are_bounded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EXTERNAL_TICKETS_MAX", 2)
    door = Door(site)
    for ticket in (1, 2, 3):
        fields: dict[str, Any] = {"write": "w", "partition": ticket, "attempt": 1}
        door.external.serve(
            ExpectUpstream(term=1, job="j1", operator=0, index=0, task_attempt=1, ticket=ticket, **fields)
        )
    expected = [door.external.refusal(ticket, 1) is None for ticket in (1, 2, 3)]
    assert expected == [False, True, True]
    door.end(4, last=True)
    await site.finish()
