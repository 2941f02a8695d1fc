"""What a pipeline's job brought although a worker was killed: Spark's batch answer is the truth."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minishuffle.errors import UsageError
from minishuffle.pipelines.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Audit", "Completeness", "WorkerKill", "audited", "check_audit", "worker_killed"]


@dataclass(frozen=True, slots=True)
class Completeness:
    """Rows of the result that belong to one value of ``Pipeline.audit_by``, compared with Spark's."""

    name: str
    equal: int
    wrong: int
    """There with other values, or more often than in Spark's answer, or not in it at all."""
    missing: int

    @property
    def percent(self) -> float:
        """The share of Spark's rows that are there and equal."""
        expected = self.equal + self.wrong + self.missing
        return 100.0 * self.equal / expected if expected else 100.0


@dataclass(frozen=True, slots=True)
class Audit:
    """A result row by row, and what the job says it lost."""

    groups: tuple[Completeness, ...]
    lost: str
    """From the job's books; empty if it lost nothing."""

    @property
    def total(self) -> Completeness:
        return Completeness(
            "all",
            sum(group.equal for group in self.groups),
            sum(group.wrong for group in self.groups),
            sum(group.missing for group in self.groups),
        )


@dataclass(slots=True)
class WorkerKill:
    """Whether and when a worker was killed."""

    worker: int = 0
    """0: none was, because the job had ended."""


def check_audit(pipeline: Pipeline) -> None:
    """Raises UsageError: the pipeline does not say which columns identify a row."""
    if not pipeline.audit_key or not pipeline.audit_by:
        raise UsageError(
            f"pipeline {pipeline.name}: an audit compares row by row: set audit_key to the columns that "
            "identify a row, and audit_by to the one by which completeness is shown"
        )


def audited(pipeline: Pipeline, result: DataFrame, expected: DataFrame, lost: str) -> Audit:
    """Compare by ``audit_key``; both have the same columns."""
    from pyspark.sql import functions as F

    keys, columns = list(pipeline.audit_key), expected.columns
    key = F.struct(*keys).alias("key")
    ours = result.groupBy(key).agg(F.count("*").alias("times"), F.first(F.struct(*columns)).alias("ours"))
    theirs = expected.select(key, F.struct(*columns).alias("theirs"))
    both = ours.join(theirs, ours["key"].eqNullSafe(theirs["key"]), "full")
    kind = (
        F.when(F.col("ours").isNull(), "missing")
        .when((F.col("times") == 1) & F.col("ours").eqNullSafe(F.col("theirs")), "equal")
        .otherwise("wrong")
    )
    by = F.coalesce(F.col("theirs"), F.col("ours")).getField(pipeline.audit_by).cast("string")
    counted = both.groupBy(by.alias("name"), kind.alias("kind")).count().collect()
    found: dict[str, dict[str, int]] = {}
    for name, what, count in counted:
        found.setdefault(str(name), {})[what] = count
    groups = [
        Completeness(name, kinds.get("equal", 0), kinds.get("wrong", 0), kinds.get("missing", 0))
        for name, kinds in sorted(found.items())
    ]
    return Audit(tuple(groups), lost)


@contextmanager
def worker_killed(after: float, kill: Callable[[], int]) -> Iterator[WorkerKill]:
    """``kill``, which gives the number of the worker, is called ``after`` seconds, unless the block ends
    before."""
    done = WorkerKill()
    over = threading.Event()

    def run() -> None:
        if not over.wait(after):
            done.worker = kill()

    thread = threading.Thread(target=run, name="worker kill")
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
