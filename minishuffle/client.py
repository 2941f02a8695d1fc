"""What a program says to a cluster: submit, wait, read rows, cancel, ask for the status."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from minishuffle.config import checked_secret, read_token
from minishuffle.errors import (
    PeerLost,
    RemoteProtocolError,
    ResourceExhausted,
    RowsLost,
    ShuffleError,
    TaskCancelled,
    TaskFailed,
    UnknownName,
    UsageError,
    counted,
    error_from_code,
)
from minishuffle.ids import Address
from minishuffle.notebook import LIVE_SECONDS, job_html, live_table
from minishuffle.observe.leftout import left_out, left_out_texts
from minishuffle.releases import releases_here
from minishuffle.snapshots.storage import place_for_all
from minishuffle.transport.control import BlockingControlClient
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.clients import DescribeStream, EndStream, StreamInfo
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.inquiries import AskWorkers, WorkersAnswered
from minishuffle.wire.messages import WORKER_NUMBER_MAX, ControlMessage, ErrorInfo
from minishuffle.wire.outputs import GetFiles, JobFiles, ListedFile
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    CancelSubmission,
    ClusterStatus,
    DrainWorker,
    GetEvents,
    GetLogs,
    GetRows,
    GetStatus,
    GraphInfo,
    JobEvent,
    JobEvents,
    JobInfo,
    JobList,
    JobLogs,
    JobRows,
    ListJobs,
    PauseJob,
    ResumeJob,
    SaveJob,
    SavepointInfo,
    ShowGraph,
    ShowJob,
    StopCluster,
    SubmitJob,
    TaskInfo,
    WaitJob,
    WaitPause,
    WaitSavepoint,
    WorkerInfo,
)

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from minishuffle.api.stream_base import StreamBase
    from minishuffle.exchange.batch import Payload
    from minishuffle.plan.graph import JobSettings

__all__ = [
    "LOSSES",
    "Client",
    "JobHandle",
    "JobResult",
    "SinkResult",
    "new_submission",
    "results_of",
    "workers_at_work",
]

_log = logging.getLogger("minishuffle.client")
LONG_POLL_SECONDS = 5.0
FIRST_POLL_SECONDS = 1.0
"""So that a failure on the first records is warned of soon; each later poll is twice as long."""
RECONNECT_SECONDS = 0.1
"""Between two tries to reach a coordinator that is away."""
ONE_SINK = "collect"
"""The sink of rows of which an earlier coordinator does not say it: no job had several then."""
OVER = frozenset({"finished", "finished_with_loss", "failed", "canceled"})

Reply = TypeVar("Reply", bound=ControlMessage)


@dataclass(slots=True, frozen=True)
class SinkResult:
    """What the ``close`` of one sink subtask returned."""

    name: str
    index: int
    value: Any


@dataclass(frozen=True, repr=False)
class JobResult:
    """How a job ended, and what its ``collect`` sinks have sent, in no particular order: as columns by
    :meth:`table`, or as :attr:`rows`."""

    job: str
    name: str
    state: str
    results: list[SinkResult]
    tasks: list[TaskInfo]
    """Every subtask with its counters."""
    seconds: float
    """From submission to end."""
    batches: dict[str, list[Payload]] = field(default_factory=dict)
    """By the name of each ``collect`` sink what it has sent: lists of rows, or record batches of a table."""
    files: int = 0
    """How many files its sinks have completed; :meth:`JobHandle.files` lists them."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many records are in no result, by what became of them: ``late`` (dropped), ``skipped`` and
    ``dead_letters`` (of ``on_error``), ``never_made`` (by a source with a rate while it did not run),
    ``dropped`` (when a task or worker failed). 0 for what there is none of. What tasks held of earlier
    records when they were lost is counted in entries of state (keys), not in records: ``state_rows_lost`` of
    each of ``tasks``."""

    def __repr__(self) -> str:
        """Numbers, no rows."""
        rows = {sink: sum(map(len, batches)) for sink, batches in self.batches.items()}
        parts = [f"{self.job!r}", f"name={self.name!r}", f"state={self.state!r}"]
        parts += [f"seconds={self.seconds:.2f}", f"rows={rows}"]
        counts = {"files": self.files, "left_out": dict(self.left_out)}
        return (
            f"JobResult({', '.join(parts + [f'{name}={count}' for name, count in counts.items() if count])})"
        )

    @cached_property
    def collected(self) -> dict[str, list[Any]]:
        """The rows of each ``collect`` sink, by its name; those of a table as dicts.

        Raises:
            UsageError: a column has a value for which Python has none, a time after the year 9999 say.
        """
        return {
            sink: [row for batch in batches for row in _rows_in(batch)]
            for sink, batches in self.batches.items()
        }

    @property
    def rows(self) -> list[Any]:
        """Those of all ``collect`` sinks, one sink after the other. Raises as :attr:`collected`."""
        return [row for rows in self.collected.values() for row in rows]

    def table(self, name: str = ONE_SINK) -> pa.Table:
        """What the ``collect`` sink of that name has sent, of a table; in the types that the table has. Where
        there is one alone, it needs no ``name``.

        Categories (an Arrow dictionary) that an exchange has decoded, and that have an order of their own,
        are plain.

        Raises:
            UnknownName: the job has no such sink.
            UsageError: the sink is one of a stream, whose rows have no columns.
        """
        from minishuffle.exchange.collected import table_of

        if name == ONE_SINK and len(self.batches) == 1:
            (name,) = self.batches
        if name not in self.batches:
            names = ", ".join(map(repr, self.batches)) or "none"
            raise UnknownName(f"job {self.job} ({self.name}) has no collect sink {name!r}: it has {names}")
        batches = self.batches[name]
        if not batches or any(isinstance(batch, list) for batch in batches):
            raise UsageError(
                f"the collect sink {name!r} is one of a stream, whose rows have no columns: call to_table() "
                "before collect(), or take the rows of JobResult.collected"
            )
        return table_of(batches)

    def to_pandas(self, name: str = ONE_SINK) -> pd.DataFrame:
        """:meth:`table` as a DataFrame of pandas.

        Raises:
            UsageError: pandas is not installed; or as :meth:`table`.
        """
        _require_installed("pandas", "to_pandas")
        return self.table(name).to_pandas()

    def to_polars(self, name: str = ONE_SINK) -> pl.DataFrame:
        """:meth:`table` as a DataFrame of Polars.

        Raises:
            UsageError: Polars is not installed; or as :meth:`table`.
        """
        _require_installed("polars", "to_polars")
        import polars as pl

        frame = pl.from_arrow(self.table(name))
        assert isinstance(frame, pl.DataFrame), "of a table"
        return frame


def _rows_in(batch: Payload) -> list[Any]:
    """Rows, of columns as dicts."""
    if isinstance(batch, list):
        return batch
    from minishuffle.exchange.batch import Batch
    from minishuffle.operators.row_conversion import rows_of

    return rows_of(Batch(batch))


def _require_installed(package: str, method: str) -> None:
    if find_spec(package) is None:
        raise UsageError(f"{method} needs the package {package}: install it (pip install {package})")


class JobHandle:
    """One submitted job."""

    def __init__(self, client: Client, job: str, name: str, parallelism: int) -> None:
        self.id = job
        self.name = name
        self.parallelism = parallelism
        self._client = client

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r}, name={self.name!r})"

    def _repr_html_(self) -> str | None:
        """Its vertices now, in a notebook; None where no coordinator answers, and its text is shown."""
        try:
            return job_html(self.info())
        except ShuffleError:
            return None

    def info(self) -> JobInfo:
        """State and tasks now."""
        return self._client.job(self.id)

    def cancel(self, *, give_up_results: bool = False) -> None:
        """Ask for the job to be cancelled; :meth:`wait` says when it is.

        Args:
            give_up_results: what its ``to_spark`` sinks keep for readers goes too, also if it has ended.

        Raises:
            UsageError: it has ended already, and keeps nothing that is to go.
        """
        self._client.cancel(self.id, give_up_results=give_up_results)

    def pause(self) -> JobInfo:
        """Pause the job, and wait until it is paused: no function of it is called then, and no row is on its
        way, but for what ``pause_left`` of the answer names. What it holds, and who reads from it or writes
        to it, stays; it goes on with :meth:`resume`. A job that is paused already stays so.

        Raises:
            UsageError: it has ended, or not all of its tasks stopped within ``pause_timeout`` and it goes on.
        """
        return self._client.pause(self.id)

    def resume(self) -> None:
        """Have the job go on, if it is paused or about to be.

        Raises:
            UsageError: it is not.
        """
        self._client.resume(self.id)

    def savepoint(self, *, stop: bool = False, into: str | Path = "") -> SavepointInfo:
        """Take a savepoint: all that the job holds, and where its sources are, in one folder, from which
        another job can begin (``restore_from`` of :meth:`Client.submit`). The job runs on, unless it is to
        ``stop``: a task stands for a moment while its state is frozen.

        Args:
            stop: cancel the job behind it; what precedes the cut is in its sinks then, and nothing else.
            into: the directory in which the folder is made, which the coordinator and all workers share, or
                ``s3://bucket/folder``; by default ``snapshot_dir``.

        Raises:
            UsageError: it was refused, or has failed; the job goes on.
        """
        return self._client.savepoint(self.id, stop=stop, into=into)

    def end_stream(self, name: str) -> None:
        """End a stream of the job that other programs write (``Table.from_spark``), endless or not: what was
        written is all there is, so that its last windows come out and the job comes to its end.

        Raises:
            UnknownName: no job that runs reads such a stream.
            UsageError: another job reads it, or the job that did has ended.
        """
        self._client.end_stream(self.id, name)

    def wait(self, timeout: float | None = None, *, allow_loss: bool = False, warn: bool = True) -> JobResult:
        """Wait until the job has ended and give its rows and results.

        Args:
            allow_loss: also if rows were lost; the result's state is ``finished_with_loss`` then.
            warn: have the logger ``minishuffle.client`` warn of late records that were dropped, and of
                those that a source with a rate never made; :attr:`JobResult.left_out` counts them.

        Raises:
            TaskFailed: the job failed; the text has the first cause and the user's traceback.
            RowsLost: it ended, but rows were lost with a task or worker that failed; the text has the first
                failure and the user's traceback.
            TaskCancelled: the job was cancelled.
            TimeoutError: ``timeout`` seconds passed; the job runs on.
        """
        info = self.wait_until_over(timeout)
        self._check_end(info, allow_loss)
        batches: dict[str, list[Payload]] = {name: [] for name in info.collects}
        for sink, batch in self._batches():
            batches.setdefault(sink, []).append(batch)
        if warn:
            for text in left_out_texts(info, ("late", "never_made")):
                _log.warning("job %s (%s): %s", info.job, info.name, text)
        return JobResult(
            job=info.job,
            name=info.name,
            state=info.state,
            results=results_of(info),
            tasks=info.tasks,
            seconds=info.ended_at - info.submitted_at,
            batches=batches,
            files=info.files_listed,
            left_out=Counter(left_out(info)),
        )

    def _check_end(self, info: JobInfo, allow_loss: bool) -> None:
        """Raise what the end of the job was, if it was not to finish."""
        if info.state == "failed":
            number = error_from_code(first_cause(info).code, "").number
            raise TaskFailed(failure_text(info), number=number)
        if info.state == "canceled":
            raise TaskCancelled(f"job {info.job} ({info.name}) was cancelled")
        if info.state == "finished_with_loss" and not allow_loss:
            raise RowsLost(loss_text(info, self.events()))

    def wait_until_over(self, timeout: float | None = None) -> JobInfo:
        """Like :meth:`wait`, but whatever the end is, only the state of the job is returned. In a notebook a
        table of its vertices is shown meanwhile. The logger ``minishuffle.client`` warns of the first failure
        of a task that restarts.

        Raises:
            TimeoutError: ``timeout`` seconds passed; the job runs on.
            PeerLost: no coordinator answered.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        show = live_table()
        longest = LONG_POLL_SECONDS if show is None else LIVE_SECONDS
        pause, told = FIRST_POLL_SECONDS, False
        while True:
            left = longest if deadline is None else deadline - time.monotonic()
            seconds, pause = min(max(left, 0.0), longest, pause), 2 * pause
            info = self._client.poll(WaitJob(job=self.id, wait_seconds=seconds), JobInfo, seconds, deadline)
            if show is not None:
                show(info)
            if info.state in OVER:
                return info
            if info.first_failure is not None and not told:
                told = True
                text = failure_lines(info.first_failure)
                _log.warning("job %s (%s) restarts a task and goes on: %s", info.job, info.name, text)
            if left <= 0:
                raise TimeoutError(f"job {self.id} ({self.name}) is still {info.state} after {timeout} s")

    def results(self) -> list[SinkResult]:
        """What the sinks' subtasks that have ended gave at their close: all of a job that was cancelled too,
        none of those that failed."""
        return results_of(self.info())

    def rows(self, *, sink: str | None = None, allow_loss: bool = False) -> Iterator[Any]:
        """The rows of the ``collect`` sinks, or of the one named ``sink``, as they come, until the job ends;
        those of a table as dicts.

        Raises:
            ResourceExhausted: they are too many to be kept for a job that ended a while ago.
            TaskFailed: after the last row, if the job failed.
            TaskCancelled: after the last row, if the job was cancelled.
            RowsLost: after the last row, if others were lost and that is not allowed.
        """
        for name, batch in self._batches():
            if sink is None or sink == name:
                yield from _rows_in(batch)
        self._check_end(self.info(), allow_loss)

    __iter__ = rows

    def _batches(self) -> Iterator[tuple[str, Payload]]:
        """What was collected, with the name of its sink."""
        from minishuffle.exchange.collected import unpack_collected

        after = 0
        while True:
            request = GetRows(job=self.id, after=after, wait_seconds=LONG_POLL_SECONDS)
            reply = self._client.poll(request, JobRows, LONG_POLL_SECONDS)
            sinks = reply.sinks or [ONE_SINK] * len(reply.batches)
            for sink, batch in zip(sinks, reply.batches, strict=True):
                yield sink, unpack_collected(batch)
            if reply.terminal and reply.next == after:
                break
            after = reply.next

    def events(self, follow: bool = False) -> Iterator[JobEvent]:
        """What happened to the job; with ``follow`` until it ends."""
        return self._client.events(self.id, follow)

    def files(self) -> Iterator[ListedFile]:
        """The files that its sinks have completed so far, oldest first: these are its output, and stay. Of
        very many the last ones."""
        return self._client.files(self.id)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """What its ``print`` sinks and its functions logged; with ``follow`` until it ends."""
        return self._client.logs(self.id, follow)


def results_of(info: JobInfo) -> list[SinkResult]:
    """What the sinks of a job gave at their close."""
    from minishuffle.exchange.rows import unpack_result  # It needs numpy.

    return [
        SinkResult(task.name, task.index, unpack_result(task.result)) for task in info.tasks if task.result
    ]


def cause_text(cause: ErrorInfo) -> str:
    """A cause with the subtask that it happened in, named once."""
    return cause.text if cause.task in cause.text else f"{cause.task}: {cause.text}"


def first_cause(info: JobInfo) -> ErrorInfo:
    """Why a job failed."""
    return info.causes[0] if info.causes else ErrorInfo(code=ShuffleError.code, text="no cause was given")


def failure_text(info: JobInfo) -> str:
    """The first cause of a failed job, with the user's own traceback and the limits reached under it."""
    cause = first_cause(info)
    text = f"job {info.job} ({info.name}) failed: {cause_text(cause)}"
    if cause.traceback.strip():
        text += f"\n{cause.traceback.rstrip()}"
    limits_reached = [other for other in info.causes[1:] if other.code == ResourceExhausted.code]
    return "\n".join([text, *(cause_text(other) for other in limits_reached)])


def workers_at_work(status: ClusterStatus) -> int:
    """How many workers are alive and take jobs; 1 if there are none."""
    there = (worker for worker in status.workers if worker.state == "alive")
    return max(1, sum(not worker.standby and not worker.draining for worker in there))


LOSSES: Final = {
    "failed_batch": "in batches that failed",
    "queue_discarded": "on their way to a task that ended",
    "upstream_unavailable": "whose consumer had gone",
    "suspected": "whose consumer's worker gave no answer",
    "partial_element": "cut in two",
    "late_after_recovery": "late after a restart",
    "sink_unfinished": "that a sink had not finished",
    "result_lost": "of a result that was kept",
}
"""The reasons of ``rows_dropped`` in words that follow a number of rows."""


_IN_PROGRAM: Final = "see job.events(). Its results are given out with allow_loss=True"


def loss_text(info: JobInfo, events: Iterable[JobEvent], advice: str = _IN_PROGRAM) -> str:
    """What a job that ended with loss has lost as far as that is known, its first failure and ``advice``,
    with the user's own traceback if the user's code raised."""
    counts = [f"{count:,} {LOSSES.get(reason, reason)}" for reason, count in info.rows_dropped.items()]
    if info.rows_in_flight:
        counts.append(f"up to {info.rows_in_flight:,} in flight through what died")
    if info.state_rows_lost:
        counts.append(counted(info.state_rows_lost, "entry of state (key)", "entries of state (keys)"))
    lost = ", ".join(counts) or "what a task may have held when it ended"
    restarts = counted(sum(info.restarts.values()), "restart")
    text = (
        f"job {info.job} ({info.name}) finished, but rows were lost in {restarts}, "
        f"{_first_failure(events)}; lost: {lost}; {advice}"
    )
    failure = info.first_failure
    if failure is None:
        return text
    more = failure.traceback if failure.text in text else failure_lines(failure)
    return f"{text}\n{more}".rstrip()


def failure_lines(failure: JobEvent) -> str:
    """What a task failed of, with the user's own traceback under it."""
    return f"{failure.text}\n{failure.traceback}".rstrip()


def _first_failure(events: Iterable[JobEvent]) -> str:
    """What happened first by which rows may be lost, and what to do if it should not count as a failure."""
    for event in events:
        if event.kind in ("task failed", "task lost", "worker draining"):
            return f"the first after: {event.text}"
        if event.kind == "worker suspected":
            advice = "raise suspect_after if workers that live are often that slow here"
            return f"the first after: {event.text}, which may have been slow and not dead ({advice})"
    return "the first after: unknown"


def _restored_from(where: str | Path, *, given: bool) -> str:
    """``given``: something is said of the savepoint."""
    if given and not where:
        raise UsageError("drop_state and trust_snapshot go with restore_from, the folder of a savepoint")
    return place_for_all(where)


def new_submission() -> str:
    """An id for a submission that no other has."""
    return secrets.token_hex(16)


class Client:
    """A connection to the coordinator of a cluster; connects at first use. Requests of several
    threads wait for each other, up to LONG_POLL_SECONDS: a client for each thread does not.

    ``address`` is an :class:`Address` or ``"HOST:PORT"``; ``secret`` is what the cluster's secret file
    holds; ``timeout`` bounds every request, in seconds. Whoever waits for a job, or follows it, does so also
    while the coordinator is away, for ``reconnect_timeout`` seconds at most, and so does whoever asks again
    over a connection that was there; ``find`` says where it is then. With ``tls`` connections use TLS:
    ``Credentials(TlsFiles(certificate, key, ca))``.

    Raises:
        UsageError: the secret is too short, or ``address`` is none.
    """

    def __init__(
        self,
        address: Address | str,
        secret: bytes,
        *,
        cluster: str = "default",
        timeout: float = 10.0,
        reconnect_timeout: float = 0.0,
        find: Callable[[], Address] | None = None,
        tls: Credentials | None = None,
    ) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self._reconnect_timeout = reconnect_timeout
        self._find = find
        self.tls = tls
        self.cluster = cluster
        self._secret = checked_secret(secret)
        self._timeout = timeout
        self._link: BlockingControlClient | None = None
        self._turn = threading.RLock()
        """Held by the thread that waits for a reply, which another one would take for its own."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection; jobs run on."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def request(self, message: ControlMessage, expected: type[Reply], wait_seconds: float = 0.0) -> Reply:
        """Send one request and give its reply, of type ``expected``.

        Raises:
            ShuffleError: what the coordinator answered, or PeerLost when it did not.
        """
        with self._turn:
            link = self._connected()
            try:
                reply = link.request(message, timeout=self._timeout + wait_seconds)
            except UsageError:
                raise
            except BaseException:
                # Whatever else went wrong, a late reply must not be taken for that of the next request.
                self.close()
                raise
        if not isinstance(reply, expected):
            self.close()
            raise RemoteProtocolError(
                f"the coordinator answered {type(message).__name__} with {type(reply).__name__}"
            )
        if warning := getattr(reply, "warning", ""):
            _log.warning("%s", warning)
        return reply

    def poll(
        self, message: ControlMessage, expected: type[Reply], wait_seconds: float, until: float | None = None
    ) -> Reply:
        """A :meth:`request` that may be sent any number of times, until a coordinator answers it.

        Args:
            until: of ``time.monotonic()``; it is not sent again after that.

        Raises:
            ShuffleError: what the coordinator answered, or PeerLost when none did for ``reconnect_timeout``.
        """
        deadline: float | None = None
        while True:
            try:
                return self.request(message, expected, wait_seconds)
            except PeerLost:
                now = time.monotonic()
                deadline = now + self._reconnect_timeout if deadline is None else deadline
                if now >= deadline or (until is not None and now >= until):
                    raise
            time.sleep(RECONNECT_SECONDS)
            if self._find is not None:
                self.address = self._find()

    def _repeated(self, message: ControlMessage, expected: type[Reply]) -> Reply:
        """A request that does no more when it is sent again: who has been connected waits until a coordinator
        is back, and who has not hears at once that there is none."""
        return self.request(message, expected) if self._link is None else self.poll(message, expected, 0.0)

    def _connected(self) -> BlockingControlClient:
        if self._link is None:
            identity = Identity(Role.CLIENT, self.cluster, 0, 0)
            self._link = BlockingControlClient(
                self.address, identity, self._secret, self._timeout, tls=self.tls
            )
        return self._link

    def submit(
        self,
        stream: StreamBase,
        *,
        name: str = "job",
        parallelism: int | None = None,
        settings: JobSettings | None = None,
        submission: str = "",
        restore_from: str | Path = "",
        drop_state: Sequence[str] = (),
        trust_snapshot: bool = False,
    ) -> JobHandle:
        """Compile and start a job.

        With ``restore_from``, the folder of a savepoint, it goes on from there, at any parallelism. Operators
        are matched by the names that they were given, else by their place in the plan; those in
        ``drop_state`` begin without state. ``trust_snapshot`` opens one that another cluster has signed.

        ``submission`` is an id of :func:`new_submission`, with which :meth:`cancel_submission` cancels the
        job also before its answer is there. If that does not come, or a signal ends the wait for it, the job
        is cancelled here.

        ``parallelism`` is for the operators that do not say their own; by default the number of
        workers alive, without those on standby, so that each takes part and their other slots stay free.

        Raises:
            UsageError: a name or the dataflow does not fit, a function cannot be pickled, or ``drop_state``
                or ``trust_snapshot`` is given without ``restore_from``.
            ResourceExhausted: not enough slots or buffers; with the arithmetic.
            UnreadableSnapshot: there is no savepoint there, or a file of it is missing, cut or changed.
            UntrustedSnapshot: it is not signed under the secret of this cluster.
        """
        from minishuffle.plan.arguments import checked_job_name
        from minishuffle.plan.planner import compile_job

        name = checked_job_name(name)
        parallelism = workers_at_work(self.status()) if parallelism is None else parallelism
        graph = compile_job(stream, parallelism=parallelism, settings=settings)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        submission = submission or new_submission()
        request = SubmitJob(
            name=name,
            python=python,
            graph=graph.to_bytes(),
            submission=submission,
            releases=releases_here(),
            restore_from=_restored_from(restore_from, given=bool(drop_state) or trust_snapshot),
            drop_state=list(drop_state),
            trust_snapshot=trust_snapshot,
        )
        self._connected()
        try:
            accepted = self.request(request, Accepted)
        except BaseException as error:
            # An answer, also one that refuses, says what became of the job; here nobody knows.
            if isinstance(error, PeerLost) or not isinstance(error, Exception):
                with contextlib.suppress(ShuffleError):
                    self.cancel_submission(submission)
            raise
        return JobHandle(self, accepted.job, name, parallelism)

    def jobs(self, *, tasks: bool = True) -> list[JobInfo]:
        """Every job that the coordinator knows, oldest first; without ``tasks``, with the number of them by
        state alone."""
        return self._repeated(ListJobs(tasks=tasks), JobList).jobs

    def job(self, job: str, *, earlier: bool = False) -> JobInfo:
        """State, tasks and causes of one job; with ``earlier``, counters of half a minute ago, where loads
        and diagnoses begin.

        Raises:
            UnknownName: there is no such job.
        """
        return self._repeated(ShowJob(job=job, earlier=earlier), JobInfo)

    def graph(self, job: str) -> GraphInfo:
        """Vertices and edges of one job.

        Raises:
            UnknownName: there is no such job.
        """
        return self._repeated(ShowGraph(job=job), GraphInfo)

    def handle(self, job: str) -> JobHandle:
        """The handle of a job that was submitted before."""
        info = self.job(job)
        return JobHandle(self, info.job, info.name, 0)

    def cancel(self, job: str, *, give_up_results: bool = False) -> None:
        """See :meth:`JobHandle.cancel`."""
        self._repeated(CancelJob(job=job, give_up_results=give_up_results), Accepted)

    def pause(self, job: str) -> JobInfo:
        """See :meth:`JobHandle.pause`."""
        self._repeated(PauseJob(job=job), Accepted)
        while True:
            info = self.poll(WaitPause(job=job, wait_seconds=LONG_POLL_SECONDS), JobInfo, LONG_POLL_SECONDS)
            if info.pause == "paused":
                return info
            if info.pause == "none":
                why = info.pause_problem or "it was paused, and somebody has resumed it"
                raise UsageError(f"job {info.job} ({info.name}) is not paused: {why}")

    def savepoint(self, job: str, *, stop: bool = False, into: str | Path = "") -> SavepointInfo:
        """See :meth:`JobHandle.savepoint`."""
        token = new_submission()
        request = SaveJob(job=job, token=token, directory=place_for_all(into), stop=stop)
        self._repeated(request, Accepted)
        while True:
            wait = WaitSavepoint(job=job, wait_seconds=LONG_POLL_SECONDS)
            info = self.poll(wait, JobInfo, LONG_POLL_SECONDS)
            found = info.savepoint
            if found.token == token and found.phase != "none":
                continue
            if found.token != token or found.problem:
                why = found.problem or "another one was taken behind it, and its own answer is gone"
                raise UsageError(f"there is no savepoint of job {info.job} ({info.name}): {why}")
            return found

    def resume(self, job: str) -> None:
        """See :meth:`JobHandle.resume`."""
        was_connected = self._link is not None
        try:
            self.request(ResumeJob(job=job), Accepted)
        except PeerLost:
            if not was_connected:
                raise
            # The coordinator may have ended before it had the job go on, or after that.
            if self.poll(ShowJob(job=job), JobInfo, 0.0).pause != "none":
                self.poll(ResumeJob(job=job), Accepted, 0.0)

    def end_stream(self, job: str, name: str) -> None:
        """See :meth:`JobHandle.end_stream`."""
        reader = self.request(DescribeStream(stream=name), StreamInfo).job
        if reader != job:
            raise UsageError(f"stream {name!r} is one of job {reader}, not of job {job}")
        self.request(EndStream(stream=name), Accepted)

    def cancel_submission(self, submission: str) -> str:
        """Cancel the job of a submission, if need be before it arrives; gives the job's id, or an empty text
        if there is no job."""
        return self.request(CancelSubmission(submission=submission), Accepted).job

    def status(self) -> ClusterStatus:
        """Workers with their connections, and jobs."""
        return self._repeated(GetStatus(), ClusterStatus)

    def workers(self, *, earlier: bool = False) -> list[WorkerInfo]:
        """The workers with their connections alone; with ``earlier``, what they reported half a minute
        ago."""
        return self._repeated(GetStatus(jobs=False, earlier=earlier), ClusterStatus).workers

    def ask_workers(self, question: AskWorkers) -> WorkersAnswered:
        """What workers hold and wait for: within a second, whatever their tasks do.

        Raises:
            UnknownName: a worker that is named is not alive.
        """
        return self._repeated(question, WorkersAnswered)

    @property
    def read_token(self) -> str:
        """What opens ``/metrics`` and the reads of REST where these are not open to all: the bearer token of
        ``Authorization``."""
        return read_token(self._secret)

    def drain(self, worker: int, timeout: float | None = None) -> None:
        """Have a worker leave: its tasks move as soon as other workers have free slots, sources with no row
        lost or repeated, and it ends when nothing runs on it, or after so many seconds in any case.

        Raises:
            UnknownName: there is no such worker.
            UsageError: that is no number of seconds.
        """
        if not 0 < worker <= WORKER_NUMBER_MAX:
            raise UnknownName(f"there is no worker {worker}: workers have numbers from 1 on")
        if timeout is not None and not 0.0 <= timeout < math.inf:
            raise UsageError(f"a timeout of {timeout} s: give a number from 0 on, or None for no limit")
        self.request(DrainWorker(worker=worker, seconds=timeout), Accepted)

    def spark_options(self, secret_file: Path) -> dict[str, str]:
        """The options by which ``format("minishuffle")`` of Spark finds this cluster.

        Args:
            secret_file: where the secret of this client stands, on every machine that asks for it.
        """
        files = self.tls.files if self.tls is not None else None
        found = {} if files is None else {f"tls-{name}": path for name, path in files._asdict().items()}
        return {
            "coordinator": str(self.address),
            "cluster": self.cluster,
            "secret-file": str(secret_file),
            **found,
        }

    def stop_cluster(self) -> None:
        """Cancel all jobs and shut the workers and the coordinator down."""
        self.request(StopCluster(), Accepted)
        self.close()

    def events(self, job: str, follow: bool = False) -> Iterator[JobEvent]:
        """Events of a job, oldest first; with ``follow`` waits for more until the job ends."""
        after, wait = 0, LONG_POLL_SECONDS if follow else 0.0
        while True:
            reply = self.poll(GetEvents(job=job, after=after, wait_seconds=wait), JobEvents, wait)
            yield from reply.events
            if not reply.events and (reply.terminal or not follow):
                return
            after = reply.events[-1].number if reply.events else after

    def files(self, job: str) -> Iterator[ListedFile]:
        """Files that the sinks of a job have completed, oldest first."""
        after = 0
        while True:
            reply = self._repeated(GetFiles(job=job, after=after), JobFiles)
            yield from reply.files
            if not reply.files:
                return
            after = reply.next

    def logs(self, job: str, follow: bool = False) -> Iterator[str]:
        """Log lines of a job, oldest first; with ``follow`` waits for more until the job ends."""
        after, wait = 0, LONG_POLL_SECONDS if follow else 0.0
        while True:
            reply = self.poll(GetLogs(job=job, after=after, wait_seconds=wait), JobLogs, wait)
            yield from reply.lines
            if not reply.lines and (reply.terminal or not follow):
                return
            after = reply.next
