"""Several DataFrames on their way into one job at once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minishuffle.client import JobHandle
from minishuffle.pipelines.contract import Input

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["write_all"]

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
