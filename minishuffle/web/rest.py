"""The coordinator's REST interface: the objects that the command line shows, as JSON under ``/api/v1``.

Requests become those that clients send over their control links, and are answered with the same messages.
``/openapi.json`` describes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minishuffle import limits
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.workers import Worker
from minishuffle.counters import CoordinatorSnapshot
from minishuffle.errors import ResourceExhausted, ShuffleError, UnknownName, UsageError
from minishuffle.ids import Address
from minishuffle.observe.diagnosis import (
    LATE_SECONDS_MAX,
    SECONDS_LEAST,
    Diagnosis,
    Look,
    diagnose_job,
    level_loads,
    links_of,
    require_running,
    seconds_between,
)
from minishuffle.observe.edgerows import (
    SAMPLE_LOOK_SECONDS,
    SAMPLE_SECONDS_DEFAULT,
    EdgeRows,
    EdgeSample,
)
from minishuffle.observe.loads import VertexLoad
from minishuffle.observe.profiles import PROFILE_LATE_SECONDS_MAX, ProfileQuestion, SubtaskProfile
from minishuffle.observe.vertices import vertex_number
from minishuffle.transport.credentials import Credentials
from minishuffle.web.openapi import Operation, openapi_document
from minishuffle.web.pools import ANSWER_SECONDS_MAX, JobBuffers, asked_workers
from minishuffle.web.refusals import json_answer
from minishuffle.web.samples import SAMPLE_SECONDS, JobSamples, Samples, WorkersSamples
from minishuffle.wire.inquiries import AskWorkers, WorkersAnswered
from minishuffle.wire.messages import WORKER_NUMBER_MAX, ControlMessage
from minishuffle.wire.outputs import GetFiles, JobFiles
from minishuffle.wire.requests import (
    JOB_LIVE,
    Accepted,
    CancelJob,
    ClusterStatus,
    DrainWorker,
    Failure,
    GetEvents,
    GetLogs,
    GetStatus,
    GraphInfo,
    JobEvents,
    JobInfo,
    JobList,
    JobLogs,
    ListJobs,
    PauseJob,
    ResumeJob,
    SaveJob,
    ShowGraph,
    ShowJob,
)

__all__ = ["CoordinatorSource", "RestInterface"]

WAIT_SECONDS_MAX: Final = 15.0
"""A request may wait so long for something new; less than the time after which connections are closed."""
DIAGNOSED_SECONDS_MAX: Final = WAIT_SECONDS_MAX - LATE_SECONDS_MAX
PROFILED_SECONDS_MAX: Final = WAIT_SECONDS_MAX - PROFILE_LATE_SECONDS_MAX
LATE_LOOK_SECONDS: Final = 0.25
"""Between the looks at a job whose subtasks report late."""
OPERATOR_MAX: Final = 1_000
"""Characters of a vertex's name in a request."""
NAME_SHOWN: Final = 20
"""Characters of a name in an error."""
NUMBER_MAX: Final = (1 << 53) - 1
_STATUS: Final = ((UnknownName, 404), (UsageError, 409), (ResourceExhausted, 503), (ShuffleError, 500))

Reply = TypeVar("Reply", bound=ControlMessage)


class CoordinatorSource(Protocol):
    """The coordinator as its web server sees it."""

    @property
    def clock(self) -> float: ...

    @property
    def journal_writable(self) -> bool: ...

    def snapshot(self) -> CoordinatorSnapshot: ...

    def look(self) -> tuple[list[Job], list[Worker]]: ...

    async def ask(self, request: ControlMessage) -> ControlMessage: ...


class After(BaseModel):
    """The query for numbered items from ``after`` on, or above it."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(0, ge=0, le=NUMBER_MAX)


class AfterOrWait(After):
    """Waits so long for something new."""

    wait_seconds: float = Field(0.0, ge=0.0, le=WAIT_SECONDS_MAX)


class Cancelling(BaseModel):
    """The query of a cancellation. ``give_up_results``: drop the results that the job's sinks keep for
    readers, even if the job has ended."""

    model_config = ConfigDict(extra="forbid")

    give_up_results: bool = False


class Saving(BaseModel):
    """The query of a savepoint. ``stop``: cancel the job behind it. ``into``: where its folder is made, by
    default in ``snapshot_dir``. ``token``: sent again with the same one, it takes no other."""

    model_config = ConfigDict(extra="forbid")

    stop: bool = False
    into: str = ""
    token: str = Field("", max_length=limits.MESSAGE_NAME_CHARS_MAX)


class Draining(BaseModel):
    """The query of a drain. ``timeout``: seconds after which the worker ends in any case."""

    model_config = ConfigDict(extra="forbid")

    timeout: float | None = Field(None, ge=0.0, allow_inf_nan=False)


class Between(BaseModel):
    """The time from now on by which a job is judged; none: the last half minute."""

    model_config = ConfigDict(extra="forbid")

    seconds: float | None = Field(None, ge=0.1, le=DIAGNOSED_SECONDS_MAX)


class Sampling(BaseModel):
    """The query of a sample. ``edge``: number of the edge in the graph; ``seconds``: time to wait for
    rows."""

    model_config = ConfigDict(extra="forbid")

    edge: int | None = Field(None, ge=0, le=NUMBER_MAX)
    seconds: float = Field(SAMPLE_SECONDS_DEFAULT, ge=0.1, le=SAMPLE_SECONDS_DEFAULT)


class Profiling(BaseModel):
    """The subtask: ``operator`` is a vertex of the job, by its number or name, or one of its operators. How
    long samples of it are taken, and how many in a second."""

    model_config = ConfigDict(extra="forbid")

    operator: str = Field("0", max_length=OPERATOR_MAX)
    index: int = Field(0, ge=0, le=NUMBER_MAX)
    seconds: float = Field(5.0, ge=0.1, le=PROFILED_SECONDS_MAX)
    rate: float = Field(50.0, ge=1.0, le=limits.PROFILE_HERTZ_MAX)


class JobLoads(BaseModel):
    """The loads of a job's vertices in the last seconds; empty if the job does not run."""

    job: str
    name: str
    state: str
    vertices: list[VertexLoad]


class JobDump(BaseModel):
    """The dumps of a job by worker, and the workers that did not answer: as ``minishuffle dump --json``."""

    workers: list[dict[str, Any]]
    silent: list[int]


class RestInterface:
    """The REST interface: adds its paths to an application, and samples all jobs every SAMPLE_SECONDS while
    that runs.

    Args:
        read_token: the token for workers on other machines; it permits only reading.
    """

    def __init__(
        self, source: CoordinatorSource, version: str, read_token: str, tls: Credentials | None = None
    ) -> None:
        self._source = source
        self._tls = tls
        self._read_token = read_token
        self._samples = Samples()
        self._session: aiohttp.ClientSession | None = None
        of_job = "/api/v1/jobs/{job}"
        events, logs = (
            "Events of a job numbered above 'after'",
            "Lines of a job's log after the first 'after'",
        )
        where = "Where a subtask spends its time"
        files, history = "Files that a job has completed", "Samples of a job of the last ten minutes"
        self._operations = [
            Operation("GET", "/api/v1/cluster", "The cluster and its workers", ClusterStatus, self._cluster),
            Operation(
                "GET",
                "/api/v1/workers/history",
                "Samples of all workers of the last ten minutes",
                WorkersSamples,
                self._workers_history,
                After,
            ),
            Operation("GET", "/api/v1/jobs", "All jobs, without their tasks", JobList, self._jobs),
            Operation("GET", of_job, "One job with its tasks", JobInfo, self._job),
            Operation("GET", f"{of_job}/graph", "The graph of a job", GraphInfo, self._graph),
            Operation("GET", f"{of_job}/loads", "How busy a job's vertices are now", JobLoads, self._loads),
            Operation(
                "GET", f"{of_job}/diagnosis", "What throttles a job", Diagnosis, self._diagnosis, Between
            ),
            Operation("GET", f"{of_job}/history", history, JobSamples, self._history, After),
            Operation("GET", f"{of_job}/buffers", "Pools and channels of a job", JobBuffers, self._buffers),
            Operation("GET", f"{of_job}/dump", "Each task and channel of a job", JobDump, self._dump),
            Operation("GET", f"{of_job}/profile", where, SubtaskProfile, self._profile, Profiling),
            Operation("GET", f"{of_job}/events", events, JobEvents, self._events, AfterOrWait),
            Operation("GET", f"{of_job}/logs", logs, JobLogs, self._logs, AfterOrWait),
            Operation("GET", f"{of_job}/files", files, JobFiles, self._files, After),
            Operation(
                "POST", f"{of_job}/tap", "The next rows that cross an edge", EdgeRows, self._tap, Sampling
            ),
            Operation("POST", f"{of_job}/cancel", "Cancel a job", Accepted, self._cancel, Cancelling),
            Operation("POST", f"{of_job}/pause", "Pause a job; its state says when", Accepted, self._pause),
            Operation("POST", f"{of_job}/resume", "Have a paused job go on", Accepted, self._resume),
            Operation("POST", f"{of_job}/savepoint", "Take a savepoint", Accepted, self._savepoint, Saving),
            Operation(
                "POST",
                "/api/v1/workers/{worker}/drain",
                "Have a worker leave once its tasks run elsewhere",
                Accepted,
                self._drain,
                Draining,
            ),
        ]
        self._version = version

    @cached_property
    def document(self) -> dict[str, Any]:
        """The document at ``/openapi.json``; created when it is first read, not when a coordinator starts."""
        return openapi_document(self._operations, self._version)

    def add_to(self, app: web.Application) -> None:
        """Serve it."""
        for operation in self._operations:
            app.router.add_route(operation.method, operation.path, _handler(operation))
        app.router.add_get("/openapi.json", self._openapi)
        app.cleanup_ctx.append(self._running)

    async def _openapi(self, _request: web.Request) -> web.Response:
        return web.json_response(self.document)

    async def _running(self, _app: web.Application) -> AsyncIterator[None]:
        """Look at jobs and workers until the server is closed."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS_MAX)
        headers = {"Authorization": f"Bearer {self._read_token}"}
        looking = asyncio.create_task(self._look_on(), name="samples")
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as self._session:
            yield
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking

    async def _look_on(self) -> None:
        while True:
            self._samples.look(*self._source.look(), self._source.clock)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _ask(self, request: ControlMessage, kind: type[Reply]) -> Reply:
        reply = await self._source.ask(request)
        assert isinstance(reply, kind)
        return reply

    # --- what is read ----------------------------------------------------------------------------

    async def _cluster(self, _job: str, _query: Any) -> ClusterStatus:
        return await self._ask(GetStatus(jobs=False), ClusterStatus)

    async def _workers_history(self, _job: str, query: After) -> WorkersSamples:
        return self._samples.of_workers(query.after)

    async def _jobs(self, _job: str, _query: Any) -> JobList:
        return await self._ask(ListJobs(tasks=False), JobList)

    async def _job(self, job: str, _query: Any) -> JobInfo:
        return await self._ask(ShowJob(job=job, results=False), JobInfo)

    async def _graph(self, job: str, _query: Any) -> GraphInfo:
        return await self._ask(ShowGraph(job=job), GraphInfo)

    async def _loads(self, job: str, _query: Any) -> JobLoads:
        info = await self._job(job, None)
        runs = info.state in JOB_LIVE
        loads = self._samples.loads(job) if runs else []
        if loads:
            links = links_of(await self._graph(job, None))
            earlier = await self._ask(ShowJob(job=job, results=False, earlier=True), JobInfo)
            loads = level_loads(loads, earlier, info, links).loads
        return JobLoads(job=job, name=info.name, state=info.state, vertices=loads)

    async def _diagnosis(self, job: str, query: Between) -> Diagnosis:
        """Judge by the last half minute, or look again once every subtask that runs has reported so much
        time, or the job has ended."""
        graph = await self._graph(job, None)
        links = links_of(graph)
        least, recent = (SECONDS_LEAST, True) if query.seconds is None else (query.seconds, False)
        before = await self._look_at(job, earlier=recent)
        require_running(before.job)
        clock = asyncio.get_running_loop().time
        deadline = clock() + least + LATE_SECONDS_MAX
        after = await self._look_at(job)
        while (
            after.job.state in JOB_LIVE
            and seconds_between(before.job, after.job) < least
            and clock() < deadline
        ):
            await asyncio.sleep(LATE_LOOK_SECONDS)
            after = await self._look_at(job)
        return diagnose_job(before, after, links)

    async def _look_at(self, job: str, *, earlier: bool = False) -> Look:
        status = await self._ask(GetStatus(jobs=False, earlier=earlier), ClusterStatus)
        return Look(
            await self._ask(ShowJob(job=job, results=False, earlier=earlier), JobInfo), status.workers
        )

    async def _history(self, job: str, query: After) -> JobSamples:
        await self._graph(job, None)
        return self._samples.of_job(job, query.after)

    async def _buffers(self, job: str, _query: Any) -> JobBuffers:
        info = await self._job(job, None)
        status = await self._cluster("", None)
        wanted = {task.worker for task in info.tasks if task.state in ("created", "running")}
        workers = [
            (each.worker, Address(each.host, each.metrics_port))
            for each in status.workers
            if each.worker in wanted and each.state == "alive"
        ]
        assert self._session is not None
        tls = None if self._tls is None else self._tls.current().dialing
        return await asked_workers(self._session, workers, job, tls)

    async def _dump(self, job: str, _query: Any) -> JobDump:
        await self._graph(job, None)
        answered = await self._ask(AskWorkers(job=job), WorkersAnswered)
        workers = [json.loads(answer) for _, answer in sorted(answered.answers.items())]
        return JobDump(workers=workers, silent=answered.silent)

    async def _profile(self, job: str, query: Profiling) -> SubtaskProfile:
        """Have its worker take it, and ask until it has ended."""
        info = await self._job(job, None)
        if info.state not in JOB_LIVE:
            raise UsageError(f"job {job} is {info.state}: only one that runs has a profile")
        vertex = vertex_number(info, query.operator)
        tasks = [task for task in info.tasks if task.operator == vertex]
        task = next((task for task in tasks if task.index == query.index), None)
        if task is None:
            text = f"vertex {vertex} ({tasks[0].name}) of job {job} has no subtask {query.index}"
            raise UnknownName(f"{text}: its last is {max(each.index for each in tasks)}")
        question = ProfileQuestion(job, task, secrets.token_hex(8), seconds=query.seconds, hertz=query.rate)
        clock = asyncio.get_running_loop().time
        deadline = clock() + query.seconds + PROFILE_LATE_SECONDS_MAX
        while (found := question.read(await self._ask(question.message, WorkersAnswered))) is None:
            if clock() > deadline:
                raise question.unanswered()
            await asyncio.sleep(LATE_LOOK_SECONDS)
        return found

    async def _events(self, job: str, query: AfterOrWait) -> JobEvents:
        request = GetEvents(job=job, after=query.after, wait_seconds=query.wait_seconds)
        return await self._ask(request, JobEvents)

    async def _logs(self, job: str, query: AfterOrWait) -> JobLogs:
        request = GetLogs(job=job, after=query.after, wait_seconds=query.wait_seconds)
        return await self._ask(request, JobLogs)

    async def _files(self, job: str, query: After) -> JobFiles:
        return await self._ask(GetFiles(job=job, after=query.after), JobFiles)

    # --- what takes the token -------------------------------------------------------------------------

    async def _tap(self, job: str, query: Sampling) -> EdgeRows:
        """Ask until there are rows enough, the time is up or the job has ended; then end the taps."""
        graph = await self._graph(job, None)
        sample = EdgeSample(await self._job(job, None), graph, query.edge, secrets.token_hex(8))
        clock = asyncio.get_running_loop().time
        deadline = clock() + query.seconds
        while not sample.complete and clock() < deadline:
            sample.add(await self._ask(sample.question(), WorkersAnswered))
            if not sample.found.producers and (await self._job(job, None)).state not in JOB_LIVE:
                break
            await asyncio.sleep(SAMPLE_LOOK_SECONDS)
        sample.add(await self._ask(sample.question(ends=True), WorkersAnswered))
        return sample.found

    async def _cancel(self, job: str, query: Cancelling) -> Accepted:
        return await self._ask(CancelJob(job=job, give_up_results=query.give_up_results), Accepted)

    async def _pause(self, job: str, _query: Any) -> Accepted:
        return await self._ask(PauseJob(job=job), Accepted)

    async def _savepoint(self, job: str, query: Saving) -> Accepted:
        token = query.token or secrets.token_hex(8)
        return await self._ask(SaveJob(job=job, token=token, directory=query.into, stop=query.stop), Accepted)

    async def _resume(self, job: str, _query: Any) -> Accepted:
        return await self._ask(ResumeJob(job=job), Accepted)

    async def _drain(self, worker: str, query: Draining) -> Accepted:
        # Python takes no number of thousands of digits.
        if not worker.isdecimal() or len(worker) > NAME_SHOWN or int(worker) > WORKER_NUMBER_MAX:
            raise UnknownName(f"there is no worker {worker[:NAME_SHOWN]!r}: workers have numbers")
        return await self._ask(DrainWorker(worker=int(worker), seconds=query.timeout), Accepted)


def _handler(operation: Operation) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return await _answer(operation, request)

    return handler


async def _answer(operation: Operation, request: web.Request) -> web.Response:
    try:
        query = operation.query.model_validate(dict(request.query))
        answer = await operation.handle(next(iter(request.match_info.values()), ""), query)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        text = f"parameter {'.'.join(map(str, first['loc']))}: {first['msg']}"
        return json_answer(Failure(code=UsageError.code, text=text), 400)
    except ShuffleError as error:
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        return json_answer(Failure(code=error.code, text=str(error)), status)
    return json_answer(answer, 200)
