"""A pipeline as queries of Structured Streaming, which can be stopped and go on later.

Each input becomes Parquet files in the order of arrival, which Spark's file source reads one after the
other. One query for each input writes them into the job, one query writes the job's result as Parquet;
each has a checkpoint. The job runs on while the queries are stopped, so what is kept of a stopped run
is the job's id: with it the queries go on where their checkpoints say.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minishuffle.client import Client, JobHandle
from minishuffle.errors import UnknownName
from minishuffle.pipelines.pipeline import DataDirectory, Input, Pipeline
from minishuffle.pipelines.run import (
    SINK,
    Outcome,
    checked_inputs,
    job_of,
    judged,
    late_rows,
    rows_taken,
    width,
)
from minishuffle.remote.access import find_access
from minishuffle.remote.writer import end_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["StreamingRun", "run_streaming"]

ROWS_PER_FILE = 50_000
FILES_PER_BATCH = 1
"""Files come one by one: event time then goes on from batch to batch as it does from file to file."""
RESULT_TRIGGER = "1 second"
POLL_SECONDS = 1


def run_streaming(
    pipeline: Pipeline,
    spark: SparkSession,
    client: Client,
    options: Mapping[str, str],
    data: DataDirectory,
    *,
    output: str,
    parallelism: int | None = None,
) -> Outcome:
    """Like :func:`~minishuffle.pipelines.run.run_once`, as streams; goes on with a run that was stopped.

    The result is in the directory ``minishuffle`` of ``output``, beside the inputs and checkpoints.
    When it is interrupted the queries stop and the job runs on, if its cluster does.
    """
    from minishuffle.spark.session import after_interrupt

    run = StreamingRun(pipeline, spark, client, options, data, output=output)
    run.prepare(parallelism)
    began = time.monotonic()
    try:
        run.start()
        run.finish()
    except KeyboardInterrupt:
        after_interrupt(spark)
        raise
    finally:
        run.stop()
    seconds = time.monotonic() - began
    ended = run.handle.info()
    result = spark.read.parquet(run.place("minishuffle"))
    verdict = judged(pipeline, spark, data, result, output)
    rows_in = rows_taken(ended)
    rows_out = verdict.rows if verdict is not None else result.count()
    rate_in, rate_out = (rows_in - run.taken_before) / seconds, (rows_out - run.read_before) / seconds
    return Outcome(result, verdict, late_rows(ended), rows_in, rate_in, rate_out)


class StreamingRun:
    """One job and the queries around it."""

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        client: Client,
        options: Mapping[str, str],
        data: DataDirectory,
        *,
        output: str,
    ) -> None:
        self.pipeline = pipeline
        self.spark = spark
        self.client = client
        self.options = dict(options)
        self.output = output
        self.access = find_access(self.options)
        self.record = data.path / "streaming.json"
        self.inputs = checked_inputs(pipeline, spark, data)
        self._handle: JobHandle | None = None
        self.writers: dict[str, StreamingQuery] = {}
        self.reader: StreamingQuery | None = None
        self.taken_before = self.read_before = 0
        """Rows that went into the job, and that Spark had read from it, before this run went on with it."""

    @property
    def handle(self) -> JobHandle:
        assert self._handle is not None, "prepare() comes first"
        return self._handle

    def place(self, *names: str) -> str:
        return "/".join((self.output.rstrip("/"), *names))

    # --- the job and its inputs -----------------------------------------------------------------

    def prepare(self, parallelism: int | None = None) -> None:
        """Find the job of a run that was stopped; else write the input files and start a job."""
        self._handle = self._stopped_run()
        if self._handle is not None:
            self.taken_before = rows_taken(self._handle.info())
            self.read_before = self._result_rows()
            return
        parallelism = width(self.client, parallelism)
        stream = job_of(self.pipeline, self.inputs, parallelism, bounded=False)
        self.record.unlink(missing_ok=True)
        for directory in ("inputs", "checkpoints", "minishuffle"):
            self._remove(self.place(directory))
        for name, given in self.inputs.items():
            files = given.slices().write.option("maxRecordsPerFile", ROWS_PER_FILE)
            files.mode("overwrite").parquet(self.place("inputs", name))
        self._handle = self.client.submit(stream, name=self.pipeline.name, parallelism=parallelism)
        submitted_at = self._handle.info().submitted_at
        self._write_record({"output": self.output, "job": self._handle.id, "submitted_at": submitted_at})

    def _stopped_run(self) -> JobHandle | None:
        """The job of a run that was stopped in this place, if its cluster still has it."""
        try:
            record = json.loads(self.record.read_text())
            if record["output"] != self.output:
                return None
            handle = self.client.handle(record["job"])
            info = handle.info()
            # Every cluster counts its jobs from 1: the moment says whether this is the same one.
            is_same = info.submitted_at == record["submitted_at"]
        except (FileNotFoundError, UnknownName):
            return None
        except (ValueError, TypeError, KeyError):  # Somebody wrote into the file.
            return None
        return handle if is_same and info.state not in ("failed", "canceled") else None

    def _write_record(self, record: dict[str, Any]) -> None:
        self.record.parent.mkdir(parents=True, exist_ok=True)
        part = self.record.with_suffix(".part")
        part.write_text(json.dumps(record))
        os.replace(part, self.record)

    def _result_rows(self) -> int:
        """Rows that Spark has read from the job so far."""
        place = self.place("minishuffle")
        system, path = self._path(place)
        return (
            self.spark.read.parquet(place).count() if system.exists(path.suffix("/_spark_metadata/0")) else 0
        )

    def _remove(self, directory: str) -> None:
        system, path = self._path(directory)
        system.delete(path, True)

    def _path(self, place: str) -> tuple[Any, Any]:
        """The place as Hadoop knows it, and the file system on which it is."""
        jvm = self.spark._jvm
        assert jvm is not None
        path = jvm.org.apache.hadoop.fs.Path(place)
        return path.getFileSystem(self.spark.sparkContext._jsc.hadoopConfiguration()), path

    # --- the queries ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start every query, from its checkpoint if it has one."""
        for name, given in self.inputs.items():
            self.writers[name] = self._start_writer(name, given)
        result = self.spark.readStream.format("minishuffle").options(**self.options)
        frame = result.option("job", self.handle.id).option("sink", SINK).load()
        files = frame.writeStream.format("parquet").option("path", self.place("minishuffle"))
        files = files.option("checkpointLocation", self.place("checkpoints", "result"))
        self.reader = files.trigger(processingTime=RESULT_TRIGGER).queryName("result").start()

    def _start_writer(self, name: str, given: Input) -> StreamingQuery:
        source = self.spark.readStream.schema(given.frame.schema)
        source = source.option("maxFilesPerTrigger", FILES_PER_BATCH)
        stream = source.parquet(self.place("inputs", name)).writeStream.format("minishuffle")
        stream = stream.options(**self.options).option("stream", name)
        stream = stream.option("checkpointLocation", self.place("checkpoints", name))
        return stream.trigger(availableNow=True).queryName(name).start()

    def finish(self) -> None:
        """Wait until every file is written, end the streams, and read the result to its end.

        Raises:
            TaskFailed: the job failed.
            StreamingQueryException: a query did.
        """
        while any(query.isActive for query in self.writers.values()):
            for query in self.writers.values():
                query.awaitTermination(POLL_SECONDS)
            self._check_job()
        for name in self.writers:
            end_stream(self.access, name)
        self.handle.wait()
        assert self.reader is not None
        self.reader.processAllAvailable()
        self.record.unlink()

    def _check_job(self) -> None:
        """Raises TaskFailed or TaskCancelled when the job ends before its streams."""
        if self.handle.info().state in ("failed", "canceled"):
            self.handle.wait()

    def stop(self) -> None:
        """Stop the queries; the job runs on."""
        for query in [*self.writers.values(), *([self.reader] if self.reader is not None else [])]:
            if query.isActive:
                query.stop()
