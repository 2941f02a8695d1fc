"""Who is sent where to write into a stream, what a commit asks of whom, and what ends with a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.scheduling.placement import buffers_needed
from minishuffle.errors import InvalidGraph, PeerLost, ResourceExhausted, UnknownName, UsageError
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.clients import (
    AbortWrite,
    BeginWrite,
    CommitWrite,
    DescribeStream,
    EndStream,
    EndWrite,
    ExpectUpstream,
    OpenUpstream,
    UpstreamExpected,
    UpstreamOpened,
    WriteBegun,
    WriteEnded,
)
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.requests import Accepted, CancelJob, Failure, SubmitJob

if TYPE_CHECKING:
    from conftest import FakeCluster

TERM = 7
CLIENT = 1_000


def graph(*streams: str, bounded: bool = True) -> JobGraph:
    """Each stream is read by two subtasks, and all go to one sink."""
    sources = [
        Vertex(
            name=f"from_spark {stream}",
            parallelism=2,
            operators=["from_spark"],
            is_source=True,
            bounded=bounded,
            program=b"",
            stream=stream,
            stream_schema=b"schema",
        )
        for stream in streams
    ]
    sink = Vertex(name="count", parallelism=2, operators=["count"], is_source=False, program=b"")
    edges = [Edge(source=i, target=len(sources), partitioner="forward") for i in range(len(sources))]
    return JobGraph(vertices=[*sources, sink], edges=edges)


def opening(
    partition: int = 0, attempt: int = 1, schema: bytes = b"schema", write: str = "w"
) -> OpenUpstream:
    return OpenUpstream(
        stream="orders",
        write=write,
        partition=partition,
        partitions=4,
        attempt=attempt,
        schema_message=schema,
    )


def committing(*partitions: int, write: str = "w") -> CommitWrite:
    return CommitWrite(stream="orders", write=write, partitions=list(partitions))


def expected(ticket: int, **fields: Any) -> UpstreamExpected:
    return UpstreamExpected(term=TERM, ticket=ticket, **fields)


def answer_ends(cluster: FakeCluster, workers: Any, **missing: list[int]) -> list[EndWrite]:
    """Each worker answers the newest EndWrite; ``missing`` by worker, as ``w1=[…]``."""
    asked = [worker.got(EndWrite)[-1] for worker in workers]
    for worker, message in zip(workers, asked, strict=True):
        lacks = missing.get(f"w{worker.worker}", [])
        cluster.send(worker, WriteEnded(term=TERM, ticket=message.ticket, missing=lacks))
    return asked


# --- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partition", "index"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_a_writer_is_sent_to_the_worker_of_its_subtask(
    cluster: FakeCluster, pair: Any, partition: int, index: int
) -> None:
    cluster.submit(graph("orders"))
    request = cluster.ask(opening(partition))
    (message,) = pair[index].got(ExpectUpstream)
    assert not pair[1 - index].got(ExpectUpstream)
    assert message == ExpectUpstream(
        term=TERM,
        job="j1",
        operator=0,
        index=index,
        task_attempt=1,
        ticket=message.ticket,
        write="w",
        partition=partition,
        attempt=1,
    )
    assert cluster.reply(request) is None
    answer = expected(message.ticket, rows=5, checksum=6, segment_bytes=4096)
    for _ in range(2):  # the second time nobody waits for it
        cluster.send(pair[index], answer)
    opened = cluster.reply(request)
    assert isinstance(opened, UpstreamOpened)
    assert (opened.term, opened.job, opened.ticket) == (TERM, "j1", message.ticket)
    assert (opened.rows, opened.checksum, opened.segment_bytes, opened.complete) == (5, 6, 4096, False)
    assert (opened.worker.worker, opened.worker.data_port) == (
        pair[index].worker,
        pair[index].about.data_port,
    )


def test_a_ticket_is_never_given_twice(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    for attempt in (1, 2, 3):
        cluster.ask(opening(0, attempt))
    tickets = [message.ticket for message in pair[0].got(ExpectUpstream)]
    assert len(set(tickets)) == 3 and tickets == sorted(tickets)


def test_what_a_worker_refuses_is_told(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    request = cluster.ask(opening())
    (message,) = pair[0].got(ExpectUpstream)
    cluster.send(pair[0], expected(message.ticket, error=ErrorInfo(code=42, text="it comes too late")))
    assert cluster.reply(request) == Failure(code=42, text="it comes too late")


def test_a_stream_says_its_job_and_schema(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders", bounded=False))
    info = cluster.request(DescribeStream(stream="orders"))
    assert (info.job, info.bounded, info.schema_message) == ("j1", False, b"schema")


def test_what_is_asked_wrongly_is_refused(cluster: FakeCluster, pair: Any) -> None:
    code, text = cluster.refusal(DescribeStream(stream="orders"))
    assert code == UnknownName.code and "no running job reads a stream 'orders' (there are: none)" in text
    cluster.submit(graph("orders"))
    code, text = cluster.refusal(opening(schema=b"other"))
    assert code == UsageError.code and "what is written to stream 'orders' does not have its schema" in text
    message = SubmitJob(name="x", python="3.11", graph=graph("orders").to_bytes())
    code, text = cluster.refusal(message)
    assert code == UsageError.code and "stream 'orders' is read by job j1 (count words) already" in text
    message = SubmitJob(name="x", python="3.11", graph=graph("flights", "flights").to_bytes())
    code, text = cluster.refusal(message)
    assert code == InvalidGraph.code and "the job reads stream 'flights' twice" in text


# --- begins ---------------------------------------------------------------------------------------


def begun(cluster: FakeCluster, worker: Any) -> None:
    """The worker answers the newest BeginWrite."""
    ticket = worker.got(BeginWrite)[-1].ticket
    cluster.send(worker, WriteBegun(term=TERM, ticket=ticket))


def test_no_partition_is_let_in_before_every_subtask_knows_of_the_write(
    cluster: FakeCluster, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the watermark of one that begins sooner, or of one that idles, passes by what the others bring."""
    cluster.writes_begin = False
    monkeypatch.setattr(limits, "LINK_REQUESTS_MAX", 4)
    cluster.submit(graph("orders", bounded=False))
    cluster.ask(opening(0, write="other"))
    cluster.ask(opening(0))
    cluster.ask(opening(2))
    for index, worker in enumerate(pair):
        _, begin = worker.got(BeginWrite)
        assert (begin.job, begin.operator, begin.index) == ("j1", 0, index)
        assert (begin.write, begin.partitions) == ("w", 4)
    begun(cluster, pair[0])
    assert not pair[0].got(ExpectUpstream)
    begun(cluster, pair[1])
    assert [message.partition for message in pair[0].got(ExpectUpstream)] == [0, 2]
    begun(cluster, pair[1])  # nobody waits for it
    cluster.ask(opening(1))
    assert [message.partition for message in pair[1].got(ExpectUpstream)] == [1]
    assert [len(worker.got(BeginWrite)) for worker in pair] == [2, 2]
    assert cluster.refusal(DescribeStream(stream="orders"))[0] == ResourceExhausted.code, "four wait"


def test_each_write_into_a_stream_without_end_begins_and_ends(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders", bounded=False))
    for batch in ("query/0", "query/1"):
        cluster.ask(opening(0, write=batch))
        request = cluster.ask(committing(0, write=batch))
        asked = answer_ends(cluster, pair)
        assert [(end.write, end.partitions) for end in asked] == [(batch, [0]), (batch, [])]
        assert cluster.reply(request) == Accepted(job="j1")
    cluster.ask(opening(0, write="query/1"))  # a batch that is repeated is known
    writes = [begin.write for begin in pair[1].got(BeginWrite)]
    assert writes == ["query/0", "query/1"]


def test_whoever_waits_for_a_write_to_begin_is_told_when_the_job_ends(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.writes_begin = False
    cluster.submit(graph("orders"))
    request = cluster.ask(opening())
    cluster.request(CancelJob(job="j1"))
    cluster.report_all("j1", "canceled")
    reply = cluster.reply(request)
    assert isinstance(reply, Failure) and "ended as canceled while its stream was written" in reply.text
    begun(cluster, pair[0])


def test_a_client_that_is_gone_does_not_wait_for_a_write_to_begin(cluster: FakeCluster, pair: Any) -> None:
    cluster.writes_begin = False
    cluster.submit(graph("orders"))
    cluster.ask(opening())
    cluster.do(cluster.state.link_closed(CLIENT, cluster.now))
    for worker in pair:
        begun(cluster, worker)
    assert not pair[0].got(ExpectUpstream)


def test_nobody_is_let_in_who_waited_for_a_write_to_begin_when_its_stream_was_ended(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.writes_begin = False
    cluster.submit(graph("orders", bounded=False))
    cluster.report_all("j1", "running")
    request = cluster.ask(opening())
    cluster.ask(EndStream(stream="orders"))
    answer_ends(cluster, pair)
    for worker in pair:
        begun(cluster, worker)
    reply = cluster.reply(request)
    assert isinstance(reply, Failure) and "stream 'orders' has ended: it was committed already" in reply.text
    assert not pair[0].got(ExpectUpstream)


def test_a_batch_is_committed_also_after_its_stream_without_end_was_ended(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph("orders", bounded=False))
    cluster.report_all("j1", "running")
    cluster.ask(EndStream(stream="orders"))
    answer_ends(cluster, pair)
    cluster.report_all("j1", "finished")
    assert cluster.request(committing(0, write="query/7")) == Accepted(job="j1")
    assert "stream 'orders' has ended" in cluster.refusal(opening(write="query/8"))[1]


# --- ends -----------------------------------------------------------------------------------------


def test_a_commit_ends_a_bounded_stream_once_all_is_there(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    request = cluster.ask(committing(0, 1, 2, 3))
    asked = answer_ends(cluster, pair)
    assert [(message.index, message.partitions, message.last) for message in asked] == [
        (0, [0, 2], False),
        (1, [1, 3], False),
    ]
    assert cluster.reply(request) is None
    assert [message.last for message in answer_ends(cluster, pair)] == [True, True]
    assert cluster.reply(request) == Accepted(job="j1")
    assert cluster.request(committing(0, 1, 2, 3)) == Accepted(job="j1")  # said again
    code, text = cluster.refusal(opening())
    assert code == UsageError.code and "stream 'orders' has ended" in text


def test_a_commit_of_what_is_not_complete_ends_nothing(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    request = cluster.ask(committing(0, 1, 2, 3))
    answer_ends(cluster, pair, w2=[3])
    reply = cluster.reply(request)
    assert isinstance(reply, Failure) and "partitions 3 of the write are not complete" in reply.text
    assert [len(worker.got(EndWrite)) for worker in pair] == [1, 1]
    cluster.ask(opening(3, attempt=2))
    assert len(pair[1].got(ExpectUpstream)) == 1


def test_a_commit_does_not_end_a_stream_without_end_but_a_name_does(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders", bounded=False))
    request = cluster.ask(committing(0, 1))
    answer_ends(cluster, pair)
    assert cluster.reply(request) == Accepted(job="j1")
    request = cluster.ask(EndStream(stream="orders"))
    assert [message.last for message in answer_ends(cluster, pair)] == [True, True]
    assert cluster.reply(request) == Accepted(job="j1")
    assert cluster.request(EndStream(stream="orders")) == Accepted(job="j1")  # said again
    assert [len(worker.got(EndWrite)) for worker in pair] == [2, 2]


@pytest.mark.parametrize("bounded", [True, False])
def test_an_abort_fails_the_job_of_a_bounded_stream_only(
    cluster: FakeCluster, pair: Any, bounded: bool
) -> None:
    cluster.submit(graph("orders", bounded=bounded))
    cluster.report_all("j1", "running")
    request = cluster.ask(AbortWrite(stream="orders", write="w", reason="no more"))
    if not bounded:
        asked = answer_ends(cluster, pair)
        assert [(end.write, end.partitions, end.last) for end in asked] == [("w", [], False)] * 2
    assert cluster.reply(request) == Accepted(job="j1")
    cluster.report_all("j1", "canceled" if bounded else "running")
    info = cluster.show("j1")
    assert info.state == ("failed" if bounded else "running")
    texts = [cause.text for cause in info.causes]
    assert texts == (["the write of stream 'orders' was aborted: no more"] if bounded else [])


def test_whoever_waits_is_told_when_the_job_ends(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    requests = [cluster.ask(opening()), cluster.ask(committing(0))]
    cluster.request(CancelJob(job="j1"))
    cluster.report_all("j1", "canceled")
    for request in requests:
        reply = cluster.reply(request)
        assert isinstance(reply, Failure)
        assert "job j1 (count words) ended as canceled while its stream was written" in reply.text
    _, text = cluster.refusal(opening())
    assert text.endswith("was written; submit the job again"), "a task that tries again hears the reason"
    cluster.submit(graph("orders"))  # the name is free again
    cluster.ask(opening())


def test_a_task_that_is_being_cancelled_leaves_the_answer_to_the_end_of_its_job(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph("orders"))
    cluster.request(CancelJob(job="j1"))
    request = cluster.ask(opening())
    (message,) = pair[0].got(ExpectUpstream)
    error = ErrorInfo(code=PeerLost.code, text="the task does not run here any more")
    cluster.send(pair[0], expected(message.ticket, error=error))
    assert cluster.reply(request) is None
    cluster.report_all("j1", "canceled")
    reply = cluster.reply(request)
    assert isinstance(reply, Failure)
    assert "job j1 (count words) ended as canceled while its stream was written" in reply.text


def test_a_bounded_stream_belongs_to_the_save_that_opened_it_first(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    cluster.report_all("j1", "running")
    cluster.ask(opening(0))
    for late in (opening(1, write="late"), committing(write="late")):
        code, text = cluster.refusal(late)
        assert code == UsageError.code
        assert "stream 'orders' is being written by another save: a bounded stream takes one" in text
    late_abort = AbortWrite(stream="orders", write="late", reason="refused")
    assert cluster.request(late_abort) == Accepted(job="j1")
    assert cluster.show("j1").state == "running", "what was refused does not fail the save before it"
    assert not pair[1].got(ExpectUpstream)
    cluster.ask(opening(0, attempt=2))
    assert len(pair[0].got(ExpectUpstream)) == 2, "the same save tries again"
    request = cluster.ask(committing(0))
    for _ in range(2):
        answer_ends(cluster, pair)
    assert cluster.reply(request) == Accepted(job="j1")
    for late in (opening(1, write="late"), committing(1, write="late")):
        assert "stream 'orders' has ended: it was committed already" in cluster.refusal(late)[1]
    assert cluster.request(late_abort) == Accepted(job="j1")
    assert cluster.show("j1").state == "running"


def test_a_commit_without_rows_keeps_other_saves_out(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    cluster.ask(committing())
    assert "another save" in cluster.refusal(opening(write="late"))[1]


def test_a_stream_without_end_takes_many_writes(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders", bounded=False))
    cluster.ask(opening(0, write="query/0"))
    cluster.ask(opening(0, write="query/1"))
    assert [message.write for message in pair[0].got(ExpectUpstream)] == ["query/0", "query/1"]


def test_whoever_comes_after_the_end_of_the_job_hears_that_it_finished(
    cluster: FakeCluster, pair: Any
) -> None:
    cluster.submit(graph("orders"))
    cluster.report_all("j1", "running")
    cluster.ask(committing(0))
    for _ in range(2):
        answer_ends(cluster, pair)
    cluster.report_all("j1", "finished")
    assert cluster.show("j1").state == "finished"
    code, text = cluster.refusal(opening(write="late"))
    assert code == UsageError.code
    assert text.endswith(
        "stream 'orders' has ended: it was committed already, its job j1 (count words) is finished; "
        "submit the job again"
    )


def test_who_writes_to_a_job_that_fails_with_its_worker_is_answered_at_its_end(
    cluster: FakeCluster, pair: Any
) -> None:
    fails = graph("orders").model_copy(update={"settings": JobSettings(restart_strategy="none")})
    cluster.submit(fails)
    before = cluster.ask(opening())
    cluster.lose(pair[0])
    after = cluster.ask(opening())
    cluster.report_all("j1", "canceled")
    for waiting in (before, after):
        reply = cluster.reply(waiting)
        assert isinstance(reply, Failure) and "worker 1" in reply.text


def test_a_client_that_is_gone_is_not_answered(cluster: FakeCluster, pair: Any) -> None:
    cluster.submit(graph("orders"))
    request = cluster.ask(opening())
    cluster.do(cluster.state.link_closed(CLIENT, cluster.now))
    (message,) = pair[0].got(ExpectUpstream)
    cluster.send(pair[0], expected(message.ticket))
    assert cluster.reply(request) is None


def test_a_stream_requires_buffers(make_graph: Any) -> None:
    needs = buffers_needed(graph("orders"), (1, 2))
    # Each: exclusive 2 + floating 1 for the stream, 2 + 1 for the gate of the forward edge, 1 + 1 for its
    # output; and 3 + 2 for another attempt of the task that reads the stream.
    assert {worker: need.segments for worker, need in needs.items()} == {1: 13, 2: 13}
    assert "stream orders: 2 exclusive + 1 floating = 3" in needs[1].arithmetic()
