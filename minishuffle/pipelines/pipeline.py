"""What a pipeline says of itself, so that it can be run, checked and shown; see :class:`Pipeline`."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from minishuffle.errors import ShuffleError, UsageError, told_from_outside
from minishuffle.plan.arguments import checked_name, checked_parallelism
from minishuffle.spark.session import spark_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from minishuffle.api.stream import Table

__all__ = ["DataDirectory", "Input", "Pipeline", "asked", "check_name", "is_frame"]


# --- contract -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """Where a pipeline keeps files: ``path`` is on this machine, ``uri`` (or None) where all can read."""

    path: Path
    uri: str | None = None

    def readable(self, spark: SparkSession, file: Path) -> str:
        """Where every task of Spark reads this file: it is copied to ``uri`` if there is one."""
        here = f"file://{file.resolve()}"  # As it is: Hadoop takes the %20 of a quoted URI for a name.
        if self.uri is None:
            return here
        jvm, context = spark._jvm, spark.sparkContext._jsc
        assert jvm is not None
        target = jvm.org.apache.hadoop.fs.Path(f"{self.uri.rstrip('/')}/{file.name}")
        source = jvm.org.apache.hadoop.fs.Path(here)
        system = target.getFileSystem(context.hadoopConfiguration())
        if not system.exists(target) or system.getFileStatus(target).getLen() != file.stat().st_size:
            system.copyFromLocalFile(False, True, source, target)
        return str(system.makeQualified(target).toString())


@dataclass(frozen=True, slots=True)
class Input:
    """A DataFrame that is written into the job, and how its rows arrive there.

    They are dealt over ``splits``, and come in the order of the columns ``order_by`` in each. Name
    enough columns that no two rows have the same values in all of them: then a task of Spark that is
    tried again gives the same rows, which the job insists on.

    Raises:
        UsageError: ``frame`` is no DataFrame or has two columns of one name, ``order_by`` names no column
            or one that is not there, or ``splits`` is no such number.
    """

    frame: DataFrame
    order_by: tuple[str, ...]
    splits: int = 1

    def __post_init__(self) -> None:
        from pyspark.sql import DataFrame

        if not isinstance(self.frame, DataFrame):
            raise UsageError(f"Input(frame=...) takes a DataFrame of Spark, not {type(self.frame).__name__}")
        columns = self.frame.columns
        twice = [name for name, count in Counter(columns).items() if count > 1]
        if twice:
            count = columns.count(twice[0])
            raise UsageError(f"Input(frame=...): there are {count} columns {twice[0]!r}: rename all but one")
        if isinstance(self.order_by, str) or not self.order_by:
            raise UsageError(f"Input(order_by=...) takes column names: write order_by=({self.order_by!r},)")
        if not isinstance(self.order_by, Sequence) or not all(isinstance(by, str) for by in self.order_by):
            raise UsageError(f"Input(order_by=...) takes names of columns, not {self.order_by!r:.80}")
        missing = [name for name in self.order_by if name not in columns]
        if missing:
            there = ", ".join(columns)
            raise UsageError(f"Input(order_by=...): there is no column {missing[0]!r}; there are {there}")
        checked_parallelism(self.splits, "Input(splits=...)")

    def dealt(self) -> DataFrame:
        """The rows as they are written: ``splits`` partitions, each of which spans all of the order."""
        return self.frame.repartition(self.splits, *self.order_by).sortWithinPartitions(*self.order_by)

    def slices(self) -> DataFrame:
        """The rows in one order, for files that are read one after the other."""
        return self.frame.coalesce(1).sortWithinPartitions(*self.order_by)


class Pipeline(ABC):
    """Data from Spark through a job and back: ``minishuffle pipeline run FILE.py:NAME``.

    Only :meth:`inputs` and :meth:`job` must be written. With :meth:`expected`, the result is compared
    with what Spark computes by itself: keep the columns of both to text, times and whole numbers, since
    sums of floats depend on the order of the rows.
    """

    name: str = "pipeline"
    """Names the job and the directory of the answers."""
    report_title: str = "rows of the result"
    audit_key: tuple[str, ...] = ()
    """Columns that identify a row of the result: see ``minishuffle pipeline run --kill-after``."""
    audit_by: str = ""
    """The column by whose values an audit shows how complete the result is."""

    @abstractmethod
    def inputs(self, spark: SparkSession, data: DataDirectory) -> Mapping[str, Input]:
        """The DataFrames to write, by the name of the table that each becomes."""

    @abstractmethod
    def job(self, tables: Mapping[str, Table]) -> Table:
        """What becomes of the tables, which have the columns of the DataFrames.

        Returns:
            the result, its schema known, without a sink.
        """

    def expected(self, spark: SparkSession, data: DataDirectory) -> DataFrame | None:
        """The same result as Spark's batch engine computes it, or None: nothing to compare with."""
        return None

    def report(self, result: DataFrame) -> DataFrame:
        """The few rows of the result to show."""
        return result.limit(10)

    def stats(self, result: DataFrame) -> dict[str, int]:
        """Numbers of the result to print by name."""
        return {}


# --- asked ----------------------------------------------------------------------------------------
#
# Calls of the methods that a user wrote: whatever they raise is reported as theirs, with the place.


HERE: Final = f"{Path(__file__).resolve().parents[1]}{os.sep}"
LIBRARIES: Final = ("site-packages", "dist-packages")


def check_name(pipeline: Pipeline) -> None:
    """Raises UsageError unless the pipeline's name can be that of a job and of a directory."""
    where = f"{type(pipeline).__name__}.name"
    name = checked_name(pipeline.name, where)
    if "/" in name or name in (".", ".."):
        raise UsageError(f"{where} is also that of a directory, which {name!r} cannot be: leave out slashes")


def asked(pipeline: Pipeline, method: str, *arguments: Any) -> Any:
    """What the pipeline's method returns.

    Raises:
        ShuffleError: it raised; the text says what, and where in the user's own code.
    """
    what = f"pipeline {pipeline.name}: {method}()"
    try:
        return getattr(pipeline, method)(*arguments)
    except UsageError as error:
        raise type(error)(f"{what}{_place(error)}: {error}") from error
    except ShuffleError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
            # In one sentence: the stack is that of Java, and longer than a screen.
            raise spark_error(error, f"{what}{_place(error)}") from error
        raise ShuffleError(f"{what} raised {told_from_outside(error, _is_ours)}") from error


def is_frame(value: Any) -> bool:
    """Whether it is a DataFrame of Spark."""
    from pyspark.sql import DataFrame

    return isinstance(value, DataFrame)


def _place(error: BaseException) -> str:
    """The innermost line of the user's own that led to the error, if there is one."""
    own = [frame for frame in _frames(error.__traceback__) if not _is_library(_file(frame))]
    return f", {_file(own[-1])}:{own[-1].tb_lineno}" if own else ""


def _frames(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_ours(file: str) -> bool:
    return file.startswith(HERE)


def _is_library(file: str) -> bool:
    if _is_ours(file) or file.startswith("<") or any(part in Path(file).parts for part in LIBRARIES):
        return True
    return file.startswith(str(Path(sys.base_prefix, "lib", "python")))
