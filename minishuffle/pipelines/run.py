"""Running a pipeline once, from its first row to the verdict."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minishuffle.api.stream import Table
from minishuffle.client import Client, JobHandle, JobResult, loss_text, workers_at_work
from minishuffle.errors import UsageError
from minishuffle.pipelines.audit import Audit, Completeness, WorkerKill, audited, check_audit, worker_killed
from minishuffle.pipelines.pipeline import DataDirectory, Input, Pipeline, asked, check_name, is_frame
from minishuffle.pipelines.verdict import Verdict, compare
from minishuffle.plan.end_steps import ExternalStep
from minishuffle.plan.nodes import inputs_first

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from minishuffle.wire.requests import JobInfo

__all__ = [
    "Fault",
    "Outcome",
    "checked_inputs",
    "job_of",
    "judged",
    "late_rows",
    "run_once",
    "slots_warning",
    "width",
    "write_all",
]

log = logging.getLogger(__name__)


# --- writes ---------------------------------------------------------------------------------------
#
# Several DataFrames on their way into one job at once.


POLL_SECONDS = 0.1
STOP_SECONDS = 30.0


def write_all(
    spark: SparkSession, inputs: Mapping[str, Input], options: Mapping[str, str], handle: JobHandle
) -> None:
    """Write all inputs at once, as jobs of Spark that share its cores; returns when they are written.

    Raises:
        TaskFailed: a function of the job raised.
        ShuffleError: a write failed; the others are stopped.
    """
    from minishuffle.spark.session import after_interrupt

    writes = [Write(spark, name, given, options) for name, given in inputs.items()]
    try:
        for write in writes:
            write.start()
        while any(write.thread.is_alive() for write in writes):
            for write in writes:
                write.thread.join(POLL_SECONDS)
            raise_first_error(writes, handle)
        raise_first_error(writes, handle)
    except KeyboardInterrupt:
        after_interrupt(spark)
        raise
    finally:
        for write in writes:
            write.stop()


class Write:
    """One input on its way into the job, in a thread of its own."""

    def __init__(self, spark: SparkSession, name: str, given: Input, options: Mapping[str, str]) -> None:
        from pyspark import inheritable_thread_target

        self.spark = spark
        self.tag = f"minishuffle-{uuid.uuid4().hex}"
        self.name = name
        self.given = given
        self.options = options
        self.error: BaseException | None = None
        target = inheritable_thread_target(spark)(self._run)
        self.thread = threading.Thread(target=target, name=f"write {name}")

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Have Spark give it up, if it is still being written."""
        if self.thread.is_alive():
            self.spark.interruptTag(self.tag)
            self.thread.join(STOP_SECONDS)

    def _run(self) -> None:
        from minishuffle.spark.session import activate

        try:
            activate(self.spark)
            self.spark.addTag(self.tag)
            writer = self.given.dealt().write.format("minishuffle").options(**self.options)
            writer = writer.option("stream", self.name).option("partitions", self.given.splits)
            writer.mode("append").save()
        except Exception as error:  # Raised by the thread that waits.
            self.error = error


def raise_first_error(writes: list[Write], handle: JobHandle) -> None:
    """Raise what went wrong: the user's function rather than the write that it broke."""
    errors = [(write.name, write.error) for write in writes if write.error is not None]
    if not errors:
        return
    info = handle.info()
    if info.state == "failed" and info.causes and info.causes[0].traceback.strip():
        handle.wait()
    raise errors[0][1]


def slots_warning(inputs: Mapping[str, Input], slots: int) -> str | None:
    """What to say if Spark runs fewer tasks at once than there are splits; None if all are written at once.

    It writes one input after the other then, and a join of the job holds the rows of one until those of the
    other come.
    """
    splits = sum(given.splits for given in inputs.values())
    if len(inputs) == 1 or splits <= slots:
        return None
    counts = ", ".join(f"{given.splits} of {name}" for name, given in inputs.items())
    return (
        f"Spark runs {slots} tasks at a time, and the inputs have {splits} splits ({counts}): it writes some "
        f"after the others, and joins hold what waits for them; --master 'local[{splits}]' writes all at once"
    )


# --- run ------------------------------------------------------------------------------------------

SINK = "result"
CANCEL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave. Rates are rows per second."""

    result: DataFrame
    """Read back from the Parquet files that it was written to."""
    verdict: Verdict | None
    """None: the pipeline says nothing to compare with."""
    late: int
    """Rows that came too late for a window or join and were left out."""
    rows_in: int
    rows_per_second: float
    """Rows of input per second, from the first row written to the end of the job."""
    rows_out_per_second: float
    """Rows of the result per second, read by Spark and written as Parquet."""
    audit: Audit | None = None
    """Row by row, if a worker was to be killed."""
    killed: int = 0
    """The worker that was; 0: none."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A worker dies so many seconds after the first row is written."""

    after: float
    kill: Callable[[], int]
    """Kills one, and gives its number."""


def checked_inputs(pipeline: Pipeline, spark: SparkSession, data: DataDirectory) -> dict[str, Input]:
    """The pipeline's inputs.

    Raises:
        UsageError: they are none, or not of type :class:`Input`, or the pipeline has no name.
        ShuffleError: the method raised.
    """
    check_name(pipeline)
    inputs = asked(pipeline, "inputs", spark, data)
    if not isinstance(inputs, Mapping) or not inputs:
        raise UsageError(f"pipeline {pipeline.name}: inputs must return a dict of stream name to Input")
    for name, given in inputs.items():
        if not isinstance(given, Input):
            kind = type(given).__name__
            raise UsageError(
                f"pipeline {pipeline.name}: the input {name!r} is a {kind}: write "
                "Input(frame, order_by=(...))"
            )
    return dict(inputs)


def job_of(
    pipeline: Pipeline, inputs: Mapping[str, Input], parallelism: int, *, bounded: bool = True
) -> Table:
    """The pipeline's job between Spark's writes and Spark's read.

    Raises:
        UsageError: ``job`` returned something else than a table without a sink, or not of all inputs.
        ShuffleError: the method raised.
    """
    from minishuffle.spark.schemas import arrow_schema_of

    tables = {}
    for name, given in inputs.items():
        # A subtask without a split would hold back the others' event time until the data end.
        subtasks = min(given.splits, parallelism) if bounded else 1
        try:
            schema = arrow_schema_of(given.frame.schema)
        except UsageError as error:
            raise UsageError(f"pipeline {pipeline.name}: the input {name!r}: {error}") from error
        tables[name] = Table.from_spark(name, schema, bounded=bounded).parallel(subtasks)
    table = asked(pipeline, "job", tables)
    if not isinstance(table, Table):
        kind = type(table).__name__
        hint = ": end it with to_table(schema)" if kind == "Stream" else ""
        raise UsageError(f"pipeline {pipeline.name}: job must return a Table, not {kind}{hint}")
    sinks = [node.label for node in table.plan.ends if node.is_sink]
    if sinks:
        raise UsageError(
            f"pipeline {pipeline.name}: job must return the result's table, which Spark reads: leave out "
            f"the sink {sinks[0]!r}"
        )
    check_uses_all(pipeline, table, inputs)
    return table.to_spark(SINK)


def check_uses_all(pipeline: Pipeline, table: Table, inputs: Mapping[str, Input]) -> None:
    """Raises UsageError when Spark would write what no job reads, or the job wait for what nobody writes."""
    steps = [node.step for node in inputs_first(table.plan.ends)]
    used = {step.boundary.name for step in steps if isinstance(step, ExternalStep)}
    for name in inputs:
        if name not in used:
            raise UsageError(f"pipeline {pipeline.name}: job() does not use the input {name!r}")
    for name in sorted(used - set(inputs)):
        raise UsageError(f"pipeline {pipeline.name}: job() reads the stream {name!r}, which is no input")


def width(client: Client, parallelism: int | None) -> int:
    """The job's parallelism: as given, else the number of workers."""
    if parallelism is not None:
        return parallelism
    return workers_at_work(client.status())


IF_ALLOWED = "with --allow-loss the exit code is 0"


def run_once(
    pipeline: Pipeline,
    spark: SparkSession,
    client: Client,
    options: Mapping[str, str],
    data: DataDirectory,
    *,
    output: str,
    parallelism: int | None = None,
    fault: Fault | None = None,
) -> Outcome:
    """Write every input into a new job, read its result, and compare it with Spark's own.

    With a ``fault`` the job may lose rows: the result is what there is, and is audited.

    ``options`` are those of ``format("minishuffle")`` that find the cluster; both answers go into the
    directories ``minishuffle`` and ``spark`` of ``output``, as Parquet.

    Raises:
        ShuffleError: the pipeline, Spark or the job failed; the job is cancelled if it still runs.
    """
    inputs = checked_inputs(pipeline, spark, data)
    if warning := slots_warning(inputs, spark.sparkContext.defaultParallelism):
        log.warning(warning)
    if fault is not None:
        check_audit(pipeline)
    parallelism = width(client, parallelism)
    stream = job_of(pipeline, inputs, parallelism)
    handle = client.submit(stream, name=pipeline.name, parallelism=parallelism)
    with cancelled_on_error(handle):
        began = time.monotonic()
        with worker_killed(fault.after, fault.kill) if fault else nullcontext(WorkerKill()) as killed:
            write_all(spark, inputs, options, handle)
            ended = handle.wait(allow_loss=fault is not None)
        seconds = time.monotonic() - began
    began = time.monotonic()
    result = read_back(spark, options, handle, f"{output}/minishuffle", allow_loss=fault is not None)
    read_seconds = time.monotonic() - began
    audit = None
    if fault is None:
        verdict = judged(pipeline, spark, data, result, output)
    elif (expected := spark_answer(pipeline, spark, data, output)) is None:
        raise UsageError(f"pipeline {pipeline.name} has no expected(): there is nothing to audit by")
    else:
        info = handle.info()
        with_loss = info.state == "finished_with_loss"
        lost = loss_text(info, client.events(handle.id), IF_ALLOWED) if with_loss else ""
        audit = audited(pipeline, result, expected, lost)
        verdict = verdict_of(audit.total)
    rows_out = verdict.rows if verdict is not None else result.count()
    return Outcome(
        result,
        verdict,
        late_rows(ended),
        rows_taken(ended),
        rows_taken(ended) / seconds,
        rows_out / max(read_seconds, 1e-9),
        audit,
        killed.worker,
    )


def read_back(
    spark: SparkSession, options: Mapping[str, str], handle: JobHandle, directory: str, *, allow_loss: bool
) -> DataFrame:
    """The job's result out of the Parquet files that Spark has written of it."""
    reader = spark.read.format("minishuffle").options(**options).option("job", handle.id)
    reader = reader.option("allow-loss", str(allow_loss).lower()).option("sink", SINK)
    reader.load().write.mode("overwrite").parquet(directory)
    return spark.read.parquet(directory)


def judged(
    pipeline: Pipeline, spark: SparkSession, data: DataDirectory, result: DataFrame, output: str
) -> Verdict | None:
    """Compare a result with what Spark computes.

    Raises: as :func:`spark_answer`.
    """
    expected = spark_answer(pipeline, spark, data, output)
    return None if expected is None else compare(result, expected)


def verdict_of(total: Completeness) -> Verdict:
    """What an audit says of all rows: one that is wrong is on both sides."""
    rows, rows_spark = total.equal + total.wrong, total.equal + total.wrong + total.missing
    return Verdict(rows, rows_spark, total.wrong, total.wrong + total.missing)


def spark_answer(
    pipeline: Pipeline, spark: SparkSession, data: DataDirectory, output: str
) -> DataFrame | None:
    """What Spark computes, written beside the result; None if the pipeline does not say.

    Raises:
        UsageError: ``expected`` returned something else than a DataFrame or None.
        ShuffleError: the method raised.
    """
    expected = asked(pipeline, "expected", spark, data)
    if expected is None:
        return None
    if not is_frame(expected):
        kind = type(expected).__name__
        raise UsageError(f"pipeline {pipeline.name}: expected must return a DataFrame or None, not {kind}")
    expected.write.mode("overwrite").parquet(f"{output}/spark")
    return spark.read.parquet(f"{output}/spark")


def rows_taken(ended: JobInfo | JobResult) -> int:
    """Rows that Spark wrote into the job."""
    return sum(task.counters.records_in for task in ended.tasks if task.name.startswith("from_spark"))


def late_rows(ended: JobInfo | JobResult) -> int:
    """Rows that a window or join of the job left out."""
    return sum(task.counters.records_late for task in ended.tasks)


@contextlib.contextmanager
def cancelled_on_error(handle: JobHandle) -> Iterator[None]:
    """Nothing goes on running when the block raises, whatever it is."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(UsageError):  # It has ended already.
            handle.cancel()
        handle.wait_until_over(CANCEL_SECONDS)
        raise
