"""``minishuffle pipeline run PIPELINE``: Spark's data through a job and back, checked by Spark."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from minishuffle.cli import tables
from minishuffle.cli.jobs import EXIT_ROWS_LOST
from minishuffle.cli.loading import load_pipeline
from minishuffle.cli.session import (
    FiniteRange,
    Session,
    json_option,
    late_global_options,
    print_json,
    session_of,
)
from minishuffle.cli.terminal import echo
from minishuffle.client import Client
from minishuffle.console import console, new_table
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.limits import PARALLELISM_MAX
from minishuffle.local import LocalCluster
from minishuffle.pipelines import DataDirectory, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from minishuffle.pipelines.audit import Audit, Completeness
    from minishuffle.pipelines.run import Outcome

__all__ = ["pipeline", "show_outcome"]

EXIT_NOT_EQUAL = 1
CONF_OPTIONS = {
    "spark.master": "--master",
    "spark.pyspark.python": "--spark-python",
    "spark.ui.enabled": "--spark-ui",
}
"""Settings of Spark that have an option of their own."""


@click.group()
def pipeline() -> None:
    """Run Spark's data through a streaming job and back."""


@pipeline.command()
@click.argument("name", metavar="PIPELINE")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="A parameter of the pipeline.")
@click.option("--master", default="local[*]", show_default=True, help="Of Spark: where its tasks run.")
@click.option("--spark-ui", is_flag=True, help="Let Spark serve its web pages.")
@click.option("--spark-python", metavar="PATH", help="Python of Spark's executors; by default this one.")
@click.option(
    "--conf",
    "spark_settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="A setting of Spark, as of spark-submit.",
)
@click.option("--data-uri", metavar="URI", help="A directory that every executor can read and write.")
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--slots", type=click.IntRange(1, 64), default=4, show_default=True, help="Per worker.")
@click.option(
    "--parallelism",
    type=click.IntRange(1, PARALLELISM_MAX),
    help="Subtasks of each operator; by default the number of workers.",
)
@click.option("--streaming", is_flag=True, help="As a query of Structured Streaming that can be resumed.")
@click.option(
    "--kill-after",
    type=FiniteRange(0, min_open=True),
    metavar="SECONDS",
    help="Kill a worker so long after the first row, and audit the result row by row.",
)
@click.option("--allow-loss", is_flag=True, help="End with code 0 also if rows were lost.")
@click.option("--output", metavar="DIR", help="Where both answers go; by default in the state directory.")
@json_option
@late_global_options
@click.pass_context
def run(
    context: click.Context,
    name: str,
    settings: tuple[str, ...],
    master: str,
    spark_ui: bool,
    spark_python: str | None,
    spark_settings: tuple[str, ...],
    data_uri: str | None,
    workers: int,
    slots: int,
    parallelism: int | None,
    streaming: bool,
    kill_after: float | None,
    allow_loss: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Run PIPELINE: a built-in name (flights, ads), module:attribute or file.py:attribute.

    The attribute is a Pipeline, a class of such, or a function that returns one; the annotated
    parameters of class or function are the --set keys. The job runs on the cluster at --coordinator,
    or else on one of its own with --workers. Ends with code 1 when the result is not what Spark
    computes, and with 3 when the job lost rows.
    """
    from minishuffle.pipelines.pipeline import check_name
    from minishuffle.pipelines.run import Fault, run_once
    from minishuffle.pipelines.streaming import run_streaming

    session = session_of(context)
    if kill_after is not None and (streaming or session.coordinator is not None):
        raise UsageError("--kill-after needs a cluster of its own: leave out --streaming and --coordinator")
    with users_output(as_json):
        found = load_pipeline(name).build(settings)
    check_name(found)
    check_data_uri(master, data_uri)
    conf = checked_conf(spark_settings)
    directory = session.directory() / "pipelines" / found.name
    data = DataDirectory(directory / "data", data_uri)
    answers = output or (f"{data_uri.rstrip('/')}/answers" if data_uri else str(directory / "answers"))
    with (
        started_spark(found.name, master, spark_ui, spark_python, conf, session.debug) as spark,
        cluster_for(session, workers, slots) as (client, options, cluster),
    ):
        given: dict[str, Any] = {"output": answers, "parallelism": parallelism}
        if kill_after is not None and cluster is not None:
            given["fault"] = Fault(kill_after, lambda: kill_last(cluster))
        run_one = run_streaming if streaming else run_once
        with users_output(as_json):
            outcome = run_one(found, spark, client, options, data, **given)
        show_outcome(found, outcome, answers, as_json)
    if kill_after is not None and not outcome.killed:
        raise UsageError("no worker was killed: the job had ended; give --kill-after fewer seconds")
    if outcome.audit is not None and outcome.audit.lost:
        context.exit(0 if allow_loss else EXIT_ROWS_LOST)
    if outcome.verdict is not None and not outcome.verdict.equal:
        context.exit(EXIT_NOT_EQUAL)


def kill_last(cluster: LocalCluster) -> int:
    """Kill the worker with the highest number, and give it."""
    worker = max(cluster.workers)
    cluster.kill_worker(worker)
    return worker


def users_output(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """Within it what the user's code prints goes to standard error if standard output is for JSON alone."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def check_data_uri(master: str, data_uri: str | None) -> None:
    """Raises UsageError when executors on other machines would look for files of this one."""
    is_local = master == "local" or master.startswith("local[")
    if not is_local and data_uri is None:
        raise UsageError(
            f"the executors of {master} need the data where all of them can read and write: give --data-uri "
            "with a directory that all machines share, or a URI such as hdfs://… or s3a://…"
        )


def checked_conf(settings: Sequence[str]) -> dict[str, str]:
    """What was given with ``--conf``, by name.

    Raises:
        UsageError: it is no ``KEY=VALUE``, no setting of Spark, or one that has an option of its own.
    """
    conf = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.startswith("spark."):
            raise UsageError(
                f"--conf {setting}: write it as spark.NAME=VALUE, e.g. --conf spark.driver.memory=4g"
            )
        if key in CONF_OPTIONS:
            raise UsageError(f"--conf {key}: give {CONF_OPTIONS[key]} instead")
        conf[key] = value
    return conf


@contextlib.contextmanager
def started_spark(
    app: str,
    master: str,
    spark_ui: bool = False,
    spark_python: str | None = None,
    conf: Mapping[str, str] | None = None,
    debug: bool = False,
) -> Iterator[SparkSession]:
    """A session of Spark for the block; nothing of it runs on after that."""
    from minishuffle.spark.session import spark_error, spark_session, stop_spark

    spark = spark_session(
        app, master=master, spark_ui=spark_ui, spark_python=spark_python, options=conf, debug=debug
    )
    try:
        yield spark
    except (ShuffleError, OSError, click.ClickException, KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:  # Spark's own, which carry what went wrong somewhere inside.
        raise spark_error(error, f"pipeline {app}") from error
    finally:
        stop_spark(spark)


@contextlib.contextmanager
def cluster_for(
    session: Session, workers: int, slots: int
) -> Iterator[tuple[Client, dict[str, str], LocalCluster | None]]:
    """The cluster that the user named, or one for this run, which is given too; with the options by which
    Spark finds it."""
    if session.coordinator is not None:
        with session.client() as client:
            yield client, client.spark_options(session.secret_path()), None
        return
    with LocalCluster(workers=workers, slots=slots) as cluster:
        yield cluster.client, cluster.spark_options(), cluster


def show_outcome(found: Pipeline, outcome: Outcome, answers: str, as_json: bool) -> None:
    """What came out: for programs, or for people."""
    if as_json:
        print_json(outcome_map(found, outcome))
    else:
        out = console()
        out.print(f"\n{found.report_title}:")
        out.print(report_table(reported(found, outcome)))
        rate_in, rate_out = tables.rate_text(outcome.rows_per_second), outcome.rows_out_per_second
        out.print(
            f"\n{outcome.rows_in:,} rows in at {rate_in}, result out at {tables.rate_text(rate_out)}, "
            f"{outcome.late:,} late; answers in {answers}"
        )
        out.print(str(outcome.verdict or "nothing to compare with: the pipeline has no expected()"))
        if outcome.audit is not None:
            show_audit(outcome.audit, found.audit_by, outcome.killed)
    if outcome.verdict is not None:
        for sentence in (*outcome.verdict.widened, *outcome.verdict.differences):
            echo(sentence, err=True)


def show_audit(audit: Audit, by: str, killed: int) -> None:
    """How complete the result is, and what the job says of what is not there."""
    out = console()
    shown = new_table(
        [by, "equal", "wrong", "missing", "complete"], right=["equal", "wrong", "missing", "complete"]
    )
    for group in (*audit.groups, audit.total):
        counts = (f"{count:,}" for count in (group.equal, group.wrong, group.missing))
        shown.add_row(group.name, *counts, f"{group.percent:.2f} %")
    out.print(f"\nworker {killed} was killed; rows of the result against Spark's:")
    out.print(shown)
    out.print(audit.lost or "the job lost nothing")


def outcome_map(found: Pipeline, outcome: Outcome) -> dict[str, Any]:
    """For JSON; what there is to compare with is null without ``expected``."""
    verdict = outcome.verdict
    return {
        "rows": verdict.rows if verdict is not None else outcome.result.count(),
        "rows_spark": verdict and verdict.rows_spark,
        "only_minishuffle": verdict and verdict.only_minishuffle,
        "only_spark": verdict and verdict.only_spark,
        "equal": verdict and verdict.equal,
        **stats_of(found, outcome),
        "late": outcome.late,
        "rows_per_second": round(outcome.rows_per_second),
        **({} if outcome.audit is None else {"audit": audit_map(outcome.audit, outcome.killed)}),
    }


def audit_map(audit: Audit, killed: int) -> dict[str, Any]:
    def counts(group: Completeness) -> dict[str, Any]:
        return {
            "equal": group.equal,
            "wrong": group.wrong,
            "missing": group.missing,
            "percent": round(group.percent, 3),
        }

    by = {group.name: counts(group) for group in audit.groups}
    return {"killed": killed, **counts(audit.total), "by": by, "lost": audit.lost}


def reported(found: Pipeline, outcome: Outcome) -> DataFrame:
    """Raises UsageError when ``report`` returned no DataFrame."""
    from minishuffle.pipelines.pipeline import asked, is_frame

    rows: DataFrame = asked(found, "report", outcome.result)
    if not is_frame(rows):
        kind = type(rows).__name__
        raise UsageError(f"pipeline {found.name}: report must return a DataFrame, not {kind}")
    return rows


def stats_of(found: Pipeline, outcome: Outcome) -> Mapping[str, Any]:
    """Raises UsageError when ``stats`` returned no dict."""
    from minishuffle.pipelines.pipeline import asked

    with users_output(as_json=True):
        stats = asked(found, "stats", outcome.result)
    if not isinstance(stats, Mapping):
        kind = type(stats).__name__
        raise UsageError(f"pipeline {found.name}: stats must return a dict of name to number, not {kind}")
    return stats


def report_table(rows: DataFrame) -> Any:
    """The rows of a report; times are in UTC."""
    # As Arrow, because times of collect() are in the time zone of this process.
    table = rows.toArrow()
    numbers = [name for name, kind in rows.dtypes if kind in ("bigint", "int", "smallint", "double")]
    shown = new_table(table.column_names, right=numbers)
    for row in table.to_pylist():
        shown.add_row(*map(cell, row.values()))
    return shown


def cell(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}Z" if value.tzinfo is not None else str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)
