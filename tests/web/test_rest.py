"""REST over a real socket, answered by the coordinator's own machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from pydantic import TypeAdapter

from minishuffle import limits
from minishuffle.counters import (
    LAG_SECONDS_BOUNDS,
    GateSnapshot,
    Histogram,
    PartitionSnapshot,
    PoolSnapshot,
    TaskCounters,
    TaskSnapshot,
    WorkerSnapshot,
)
from minishuffle.web.pools import JobBuffers, WorkerBuffers
from minishuffle.web.rest import SAMPLE_SECONDS
from minishuffle.web.server import serve_coordinator_web, serve_worker_web
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import (
    ClusterStatus,
    GetEvents,
    GetStatus,
    GraphInfo,
    JobEvents,
    JobInfo,
    JobList,
    ShowJob,
)
from support.accesses import READ_TOKEN, TOKEN, access, worker_access
from support.coordinators import ScriptedCoordinator
from support.snapshots import idle_worker

HOST = "127.0.0.1"
SECONDS_MAX = 20.0


class Rest:
    """A client of a coordinator's REST interface."""

    def __init__(self, coordinator: ScriptedCoordinator, port: int, session: aiohttp.ClientSession) -> None:
        self.coordinator = coordinator
        self._base = f"http://{HOST}:{port}"
        self._session = session

    async def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        """Status and what the JSON says, or the text."""
        url = self._base + path
        async with self._session.request(method, url, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    async def get(self, path: str) -> Any:
        status, answer = await self.ask(path)
        assert status == 200, answer
        return answer


@asynccontextmanager
async def rest(coordinator: ScriptedCoordinator | None = None) -> AsyncIterator[Rest]:
    source = coordinator or ScriptedCoordinator()
    server = await serve_coordinator_web(source, 0, access())
    try:
        async with aiohttp.ClientSession() as session:
            yield Rest(source, server.port, session)
    finally:
        await server.close()


def bounded(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(body(), SECONDS_MAX)

    asyncio.run(main())


# --- what is served --------------------------------------------------------------------------------


def test_jobs_and_workers_are_those_that_clients_see() -> None:
    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit(parallelism=2)
            shown = JobInfo.model_validate(await api.get(f"/api/v1/jobs/{job}"))
            assert shown == api.coordinator.request(ShowJob(job=job))
            assert len(shown.tasks) == 4
            (listed,) = JobList.model_validate(await api.get("/api/v1/jobs")).jobs
            assert (listed.job, listed.tasks, listed.task_states) == (job, [], {"running": 4})
            status = ClusterStatus.model_validate(await api.get("/api/v1/cluster"))
            assert (status.cluster, status.term, status.jobs) == ("blue", 3, [])
            assert [worker.slots_free for worker in status.workers] == [2]
            graph = GraphInfo.model_validate(await api.get(f"/api/v1/jobs/{job}/graph"))
            assert [vertex.name for vertex in graph.vertices] == ["read", "count"]
            assert [(edge.source, edge.target, edge.partitioner) for edge in graph.edges] == [(0, 1, "hash")]
            assert (graph.restart_strategy, graph.on_unavailable) == ("individual", "drop")

    bounded(body)


def test_events_come_from_where_the_reader_is() -> None:
    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()
            path = f"/api/v1/jobs/{job}/events"
            all_events = JobEvents.model_validate(await api.get(path))
            assert all_events == api.coordinator.request(GetEvents(job=job))
            assert [event.kind for event in all_events.events] == [
                "created",
                "task running",
                "task running",
                "running",
            ]
            some = JobEvents.model_validate(await api.get(f"{path}?after=2"))
            assert some.events == all_events.events[2:]
            assert await api.get(f"/api/v1/jobs/{job}/logs") == {
                "type": "job_logs",
                "lines": [],
                "next": 0,
                "terminal": False,
            }
            assert await api.get(f"/api/v1/jobs/{job}/files") == {"type": "job_files", "files": [], "next": 0}

    bounded(body)


def test_loads_and_history_are_those_of_the_last_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minishuffle.web.rest.SAMPLE_SECONDS", 0.01)
    assert SAMPLE_SECONDS > 0.01

    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()
            base, busy = f"/api/v1/jobs/{job}", 0.0
            while True:  # Each look finds that the job was busy since the last one.
                busy += 1.0
                counters = TaskCounters(busy_seconds=busy, records_out=int(100 * busy))
                taken = TaskCounters(busy_seconds=busy, records_in=int(10 * busy))
                api.coordinator.heartbeat({(job, 0, 0): counters, (job, 1, 0): taken})
                loads = await api.get(f"{base}/loads")
                if loads["vertices"] and loads["vertices"][0]["busy"]:
                    break
                await asyncio.sleep(0)
            assert (loads["job"], loads["name"], loads["state"]) == (job, "words", "running")
            first = loads["vertices"][0]
            assert (first["name"], first["level"], first["records_out"]) == ("read", "OK", 100.0)
            assert [subtask["index"] for subtask in first["subtasks"]] == [0]
            assert loads["vertices"][1]["level"] == "BEHIND", "a tenth of what is sent to it"
            history = await api.get(f"{base}/history")
            assert history["next"] >= 1
            assert 1.0 in history["vertices"][0]["busy"]
            workers = await api.get("/api/v1/workers/history?after=1")
            assert [worker["worker"] for worker in workers["workers"]] == [1]

    bounded(body)


@pytest.mark.parametrize("query", ["?seconds=0.1", ""])
def test_a_job_is_diagnosed_once_its_subtasks_have_reported_the_time(
    monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr("minishuffle.web.rest.LATE_LOOK_SECONDS", 0.01)
    monkeypatch.setattr("minishuffle.web.rest.SECONDS_LEAST", 0.1)

    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()

            def counted(source: TaskCounters, sink: TaskCounters) -> None:
                api.coordinator.heartbeat({(job, 0, 0): source, (job, 1, 0): sink})

            path = f"/api/v1/jobs/{job}/diagnosis{query}"
            counted(TaskCounters(busy_seconds=1.0), TaskCounters(busy_seconds=1.0))
            asked = asyncio.create_task(api.get(path))
            while not asked.done():  # It begins with the first look, whenever that is.
                counters = api.coordinator.request(ShowJob(job=job)).tasks
                source, sink = (task.counters for task in counters)
                counted(
                    replace(source, backpressured_seconds=source.backpressured_seconds + 0.01),
                    replace(sink, busy_seconds=sink.busy_seconds + 0.01, cpu_seconds=sink.cpu_seconds + 0.01),
                )
                await asyncio.sleep(0.001)
            found = await asked
            assert list(found) == ["job", "verdict", "task", "rule", "evidence", "advice"]
            assert (found["job"], found["verdict"]) == (job, "throttled")
            assert (found["task"], found["rule"]) == ("count[0]", "slow function")
            assert found["evidence"]["its_backpressure"] == 1.0
            assert (await api.ask(f"/api/v1/jobs/{job}/diagnosis?seconds=11"))[0] == 400
            looks: list[ControlMessage] = []
            answered = api.coordinator.request
            monkeypatch.setattr(
                api.coordinator, "request", lambda each: (looks.append(each), answered(each))[1]
            )
            asked = asyncio.create_task(api.get(path))
            while not any(isinstance(each, GetStatus) for each in looks):
                await asyncio.sleep(0)
            for operator in (0, 1):
                api.coordinator.report(job, operator, 0, "finished")
            assert (await asked)["job"] == job, "it ended between the looks"
            status, failure = await api.ask(path)
            assert (status, failure["text"]) == (
                409,
                f"job {job} is finished: only one that runs can be diagnosed",
            )

    bounded(body)


def test_latency_markers_are_in_the_counters_of_a_task() -> None:
    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()
            latency = {"count": 7.0, "p50": 0.001, "p95": 0.002, "p99": 0.003, "max": 0.004}
            api.coordinator.heartbeat({(job, 1, 0): TaskCounters(latency=latency)})
            shown = await api.get(f"/api/v1/jobs/{job}")
            assert [task["counters"]["latency"] for task in shown["tasks"]] == [{}, latency]

    bounded(body)


GATE = GateSnapshot(3, 2, 4, 1, 8, 2, 1, 5, 0, None)
PARTITION = PartitionSnapshot(6, PoolSnapshot(7, 9))


def worker_with(*jobs: str) -> WorkerSnapshot:
    tasks = tuple(
        TaskSnapshot(
            job=job,
            job_name="words",
            operator=1,
            name="count",
            index=0,
            attempt=1,
            state="running",
            counters=TaskCounters(),
            blocks=Histogram(LAG_SECONDS_BOUNDS),
            operators=(),
            gates=(GATE,),
            partitions=(PARTITION,),
        )
        for job in jobs
    )
    return idle_worker(slots_used=1, tasks=tasks)


def test_pools_and_channels_come_from_the_workers() -> None:
    async def body() -> None:
        worker = await serve_worker_web(
            lambda: worker_with("j1", "j2"), 0, worker_access(reads_are_open=False)
        )
        try:
            async with rest(ScriptedCoordinator(metrics_port=worker.port)) as api:
                job = api.coordinator.submit()
                found = JobBuffers.model_validate(await api.get(f"/api/v1/jobs/{job}/buffers"))
                assert found.silent == []
                (task,) = found.tasks
                assert (task.job, task.operator, task.worker) == (job, 1, 1)
                assert TypeAdapter(list[GateSnapshot]).dump_python(task.gates) == [
                    TypeAdapter(GateSnapshot).dump_python(GATE)
                ]
                assert task.partitions == [PARTITION]
        finally:
            await worker.close()

    bounded(body)


def test_a_worker_that_does_not_answer_is_named() -> None:
    async def body() -> None:
        async with rest(ScriptedCoordinator(metrics_port=9)) as api:
            job = api.coordinator.submit()
            assert await api.get(f"/api/v1/jobs/{job}/buffers") == {"tasks": [], "silent": [1]}

    bounded(body)


def test_a_dump_is_what_each_worker_answers() -> None:
    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()
            dumped = await api.get(f"/api/v1/jobs/{job}/dump")
            assert dumped == {"workers": [{"of": job}], "silent": []}
            assert (await api.ask("/api/v1/jobs/j9/dump"))[0] == 404

    bounded(body)


def test_a_profile_is_asked_for_until_it_has_ended() -> None:
    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit(parallelism=2)
            path = f"/api/v1/jobs/{job}/profile"
            found = await api.get(f"{path}?operator=count&index=1&seconds=0.5&rate=100")
            tasks = {(task.operator, task.index): task for task in api.coordinator.tasks.values()}
            assert (found["job"], found["task"], found["state"]) == (job, f"{tasks[1, 1].name}[1]", "ended")
            assert len(api.coordinator.profiles) == 2 and len(set(api.coordinator.profiles)) == 1
            for query, status, text in (
                ("operator=9", 404, "no vertex or operator '9': name one by its number: 0 (read), 1 (count)"),
                (
                    "operator=count&index=2",
                    404,
                    f"vertex 1 (count) of job {job} has no subtask 2: its last is 1",
                ),
                ("seconds=11", 400, "parameter seconds"),
                ("rate=1000", 400, "parameter rate"),
            ):
                refused = await api.ask(f"{path}?{query}")
                assert refused[0] == status and text in refused[1]["text"], query

    bounded(body)


def test_a_worker_serves_the_buffers_of_all_its_tasks() -> None:
    async def body() -> None:
        worker = await serve_worker_web(lambda: worker_with("j1", "j2"), 0, worker_access())
        try:
            url = f"http://{HOST}:{worker.port}/api/v1/buffers"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                found = WorkerBuffers.model_validate_json(await response.read())
            assert [task.job for task in found.tasks] == ["j1", "j2"]
        finally:
            await worker.close()

    bounded(body)


# --- what is changed, and what is refused ----------------------------------------------------------


def test_a_token_that_is_no_text_is_a_wrong_one() -> None:
    """No client library sends such a header, but anybody can."""

    async def body() -> None:
        server = await serve_coordinator_web(ScriptedCoordinator(), 0, access())
        try:
            reader, writer = await asyncio.open_connection(HOST, server.port)
            request = b"GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n"
            writer.write(request)
            assert (await reader.readline()).split()[1] == b"401"
            writer.close()
        finally:
            await server.close()

    bounded(body)


def test_cancelling_needs_the_token() -> None:
    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()
            path = f"/api/v1/jobs/{job}/cancel"
            for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": f"Basic {TOKEN}"}):
                status, answer = await api.ask(path, "POST", **headers)
                assert (status, "minishuffle cluster token" in answer["text"]) == (401, True)
            assert (await api.get(f"/api/v1/jobs/{job}"))["state"] == "running"
            status, answer = await api.ask(path, "POST", Authorization=f"Bearer {TOKEN}")
            assert (status, answer) == (200, {"type": "accepted", "job": job, "warning": ""})
            assert (await api.get(f"/api/v1/jobs/{job}"))["state"] == "canceling"
            status, _ = await api.ask(path, "GET", Authorization=f"Bearer {TOKEN}")
            assert status == 405

    bounded(body)


TAPPED = {
    "at": 1.5,
    "producer": 0,
    "attempt": 1,
    "consumer": 2,
    "time": 5,
    "key": None,
    "columns": ["word"],
    "values": ["'x'"],
}


def test_rows_of_an_edge_need_the_token_and_the_tap_ends_with_the_answer() -> None:
    async def body() -> None:
        async with rest(ScriptedCoordinator(rows=[TAPPED] * 3)) as api:
            job = api.coordinator.submit()
            path = f"/api/v1/jobs/{job}/tap?edge=0"
            for headers in ({}, {"Authorization": f"Bearer {READ_TOKEN}"}):
                assert (await api.ask(path, "POST", **headers))[0] == 401
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert (await api.ask(path, "GET", **headers))[0] == 405
            assert (await api.ask(path + "&seconds=11", "POST", **headers))[0] == 400
            assert (await api.ask(path.replace("=0", "=1"), "POST", **headers))[0] == 404
            assert api.coordinator.tapped == 0
            status, found = await api.ask(path, "POST", **headers)
            assert (status, found["source"], found["target"]) == (200, "read", "count")
            assert found["rows"] == [TAPPED] * limits.TAP_ROWS
            assert api.coordinator.tapped > 0 and not api.coordinator.taps
            status, found = await api.ask(path + "&seconds=0.1", "POST", **headers)
            assert (status, len(found["rows"])) == (200, 6), "what has come in the time, and with the end"

    bounded(body)


def test_a_job_is_paused_and_resumed() -> None:
    """Its state says how far that is: the answer does not wait."""

    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()
            headers = {"Authorization": f"Bearer {TOKEN}"}
            for path, state in (("pause", "pausing"), ("resume", "running")):
                status, _ = await api.ask(f"/api/v1/jobs/{job}/{path}", "POST", **headers)
                info = await api.get(f"/api/v1/jobs/{job}")
                assert (status, info["state"]) == (200, state)
            assert info["pause_problem"] == "it was resumed before it was paused"
            status, answer = await api.ask(f"/api/v1/jobs/{job}/resume", "POST", **headers)
            assert (status, answer["text"]) == (409, f"job {job} is running, not paused")

    bounded(body)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/v1/jobs/j9", 404, "there is no job 'j9'; the latest are j1"),
        ("/api/v1/jobs/j9/graph", 404, "there is no job"),
        ("/api/v1/jobs/j9/loads", 404, "there is no job"),
        ("/api/v1/jobs/j9/history", 404, "there is no job"),
        ("/api/v1/jobs/j9/buffers", 404, "there is no job"),
        ("/api/v1/jobs/j1/events?after=-1", 400, "parameter after: "),
        ("/api/v1/jobs/j1/events?after=x", 400, "parameter after: "),
        ("/api/v1/jobs/j1/events?wait_seconds=1e9", 400, "parameter wait_seconds: "),
        ("/api/v1/jobs/j1/events?wait_seconds=nan", 400, "parameter wait_seconds: "),
        ("/api/v1/jobs?page=2", 400, "parameter page: "),
        ("/api/v1/job", 404, "there is no /api/v1/job: /openapi.json describes every path"),
        ("/api/v1/jobs/j1/cancel", 405, "/api/v1/jobs/j1/cancel takes POST, not GET: "),
    ],
)
def test_what_cannot_be_answered_says_why(path: str, status: int, text: str) -> None:
    async def body() -> None:
        async with rest() as api:
            api.coordinator.submit()
            found, answer = await api.ask(path)
            assert (found, answer["type"]) == (status, "failure")
            assert answer["text"].startswith(text)

    bounded(body)


def test_a_job_that_has_ended_cannot_be_cancelled() -> None:
    async def body() -> None:
        async with rest() as api:
            job = api.coordinator.submit()
            for operator in (0, 1):
                api.coordinator.report(job, operator, 0, "finished")
            headers = {"Authorization": f"Bearer {TOKEN}"}
            status, answer = await api.ask(f"/api/v1/jobs/{job}/cancel", "POST", **headers)
            assert (status, "is finished already" in answer["text"]) == (409, True)
            for value, expected in (("true", 409), ("perhaps", 400)):
                path = f"/api/v1/jobs/{job}/cancel?give_up_results={value}"
                assert (await api.ask(path, "POST", **headers))[0] == expected
            assert await api.get(f"/api/v1/jobs/{job}/loads") == {
                "job": job,
                "name": "words",
                "state": "finished",
                "vertices": [],
            }

    bounded(body)


@pytest.mark.parametrize(
    ("worker", "status", "text"),
    [
        ("1", 200, ""),
        ("7", 404, "there is no worker 7; alive: 1"),
        ("one", 404, "there is no worker 'one': workers have numbers"),
        ("-1", 404, "there is no worker '-1': workers have numbers"),
        ("9" * 5000, 404, f"there is no worker '{'9' * 20}': workers have numbers"),
    ],
    ids=["a worker", "none", "a name", "a sign", "long"],
)
def test_a_worker_is_told_to_leave_by_its_number(worker: str, status: int, text: str) -> None:
    async def body() -> None:
        async with rest() as api:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            found, answer = await api.ask(f"/api/v1/workers/{worker}/drain?timeout=5", "POST", **headers)
            assert (found, answer["text"] if text else "") == (status, text)
            draining = [
                each["worker"] for each in (await api.get("/api/v1/cluster"))["workers"] if each["draining"]
            ]
            assert draining == ([1] if status == 200 else [])

    bounded(body)
