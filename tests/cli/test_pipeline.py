"""``minishuffle pipeline run``: what is refused before anything is started, and the verdict's exit code."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from pyspark.sql import DataFrame, SparkSession

from minishuffle.cli import pipeline as command
from minishuffle.errors import ShuffleError
from minishuffle.pipelines import Pipeline
from minishuffle.pipelines.run import Outcome
from minishuffle.pipelines.verdict import compare
from support.documents import ROOT, SPARK, blocks

pytestmark = pytest.mark.extra

Run = Callable[..., Result]

ROWS = [(f"c{number % 5}", datetime(2013, 4, 19, number % 24, tzinfo=UTC), number) for number in range(60)]
SCHEMA = "carrier STRING, time_hour TIMESTAMP, dep_delay_min BIGINT"
OWN = """
from minishuffle.pipelines import Pipeline

class Own(Pipeline):
    name = "own"
    report_title = "what it found"

    def __init__(self, size: int = 3):
        self.name = f"own{size}"

    def inputs(self, spark, data):
        return {}

    def job(self, streams):
        raise AssertionError

    def stats(self, result):
        row = result.agg({"dep_delay_min": "sum"}).first()
        return {"dep_delay_min": row[0]}

def pipeline(size: int = 3) -> Pipeline:
    return Own()

own = Own()
number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["fligts"], "there is no built-in pipeline 'fligts'; did you mean 'flights'?"),
        (["absent.py:pipeline"], "there is no file absent.py"),
        (["absent.py"], "say which attribute of the file is the pipeline, as absent.py:ATTRIBUTE"),
        (["{own}:other"], "there is no attribute 'other'; there are own, Own, pipeline"),
        (["{own}:number"], "is of type int, not a Pipeline nor a function that returns one"),
        (["{own}:Pipeline"], "not a Pipeline nor a function that returns one"),
        (["{own}:own", "--set", "size=3"], "pipeline own takes no parameters"),
        (["{own}:pipeline", "--set", "sise=3"], "did you mean 'size'? pipeline() takes size: int = 3"),
        (["flights", "--set", "splits=none"], "--set splits=none: "),
        (["flights", "--set", "watermarks=all"], "Input should be 'batch' or 'each'"),
        (
            ["flights", "--master", "spark://h:7077"],
            "the executors of spark://h:7077 need the data where all",
        ),
        (["flights", "--master", "local-cluster[2,1,1024]"], "give --data-uri with a directory"),
        (["flights", "--conf", "driver.memory=4g"], "write it as spark.NAME=VALUE"),
        (["flights", "--conf", "spark.driver.memory"], "write it as spark.NAME=VALUE"),
        (["flights", "--conf", "spark.master=local[4]"], "give --master instead"),
    ],
)
def test_what_is_refused_before_anything_is_started(
    run: Run, own: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    monkeypatch.setattr(command, "started_spark", None)
    result = run("pipeline", "run", *(text.format(own=own) for text in arguments))
    assert result.exit_code == 2 and problem in result.output, result.output
    assert result.output.count("\n") == 1


def test_a_class_and_settings_of_spark(run: Run, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is made with --set, and --conf goes to the session."""
    given: list[Any] = []

    def started(*arguments: Any) -> None:
        given.extend(arguments)
        raise ShuffleError("Spark does not start")

    monkeypatch.setattr(command, "started_spark", started)
    conf = ["--conf", "spark.driver.memory=4g", "--conf", "spark.a=b=c"]
    result = run("pipeline", "run", f"{own}:Own", "--set", "size=5", *conf)
    assert "Spark does not start" in result.output
    assert given[0] == "own5" and {"spark.driver.memory": "4g", "spark.a": "b=c"} in given


@pytest.mark.parametrize("as_json", [True, False])
def test_standard_output_is_for_json_alone_if_it_is_asked_for(
    run: Run, own: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    own.write_text(
        OWN.replace("        row = ", "        print('stats')\n        row = ") + "print('loaded')\n"
    )

    class Result:
        def agg(self, _: Any) -> Any:
            return self

        def first(self) -> list[int]:
            return [8]

        def count(self) -> int:
            return 3

        def limit(self, _: int) -> Any:
            raise ShuffleError("nothing to show")

    def pretended(*_: Any, **__: Any) -> Outcome:
        print("run")
        return Outcome(Result(), None, 0, 0, 0.0, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr("minishuffle.pipelines.run.run_once", pretended)
    monkeypatch.setattr(command, "started_spark", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(command, "cluster_for", lambda *_: contextlib.nullcontext((None, {}, None)))
    result = run("pipeline", "run", f"{own}:own", *(["--json"] if as_json else []))
    if as_json:
        assert json.loads(result.stdout)["dep_delay_min"] == 8
        assert result.stderr == "loaded\nrun\nstats\n"
    else:
        assert result.stdout.startswith("loaded\nrun\n")


@pytest.fixture
def run_with(
    run: Run, own: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Runs the command on a result that a job is said to have given."""

    def with_result(rows: list[Any] | None, *arguments: str) -> Result:
        def pretended(pipeline: Pipeline, *_: Any, **__: Any) -> Outcome:
            expected = frame(spark, ROWS)
            result = expected if rows is None else frame(spark, rows)
            verdict = None if rows is None else compare(result, expected)
            return Outcome(result, verdict, 7, 1_000, 250.4, 10.0)

        monkeypatch.setattr("minishuffle.pipelines.run.run_once", pretended)
        monkeypatch.setattr(command, "started_spark", lambda *_: contextlib.nullcontext(spark))
        monkeypatch.setattr(command, "cluster_for", lambda *_: contextlib.nullcontext((None, {}, None)))
        return run("pipeline", "run", f"{own}:pipeline", *arguments)

    return with_result


def frame(spark: SparkSession, rows: list[Any]) -> DataFrame:
    return spark.createDataFrame(rows, SCHEMA)


pretending = pytest.mark.usefixtures("wider_resources")


@pytest.mark.slow
@pretending
def test_a_result_that_is_right(run_with: Callable[..., Result]) -> None:
    result = run_with(ROWS[::-1])
    assert result.exit_code == 0, result.output
    assert "what it found:" in result.output and "2013-04-19 11:00:00Z" in result.output
    assert "1,000 rows in at 250/s, result out at 10/s, 7 late" in result.output
    assert result.output.splitlines()[-1] == "EQUAL: 60 rows of minishuffle and of Spark"
    told = json.loads(run_with(ROWS, "--json").output)
    assert list(told) == [
        "rows",
        "rows_spark",
        "only_minishuffle",
        "only_spark",
        "equal",
        "dep_delay_min",
        "late",
        "rows_per_second",
    ]
    assert list(told.values()) == [60, 60, 0, 0, True, sum(range(60)), 7, 250]


@pytest.mark.slow
@pretending
def test_a_result_that_is_wrong(run_with: Callable[..., Result]) -> None:
    """In one value. What else may be wrong, and how it is counted: ``pipelines/test_verdict.py``."""
    rows = [*ROWS[:-1], (*ROWS[-1][:2], 60)]
    result = run_with(rows)
    assert result.exit_code == 1 and "\nNOT EQUAL: " in result.output
    assert result.output.count("only of ") - 1 >= 1
    result = run_with(rows, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert [*told.values()][:5] == [60, 60, 1, 1, False]
    differences = result.stderr.splitlines()
    assert len(differences) == 2
    assert all(text.startswith("only of ") for text in differences)


@pytest.mark.slow
@pretending
def test_nothing_to_compare_with(run_with: Callable[..., Result]) -> None:
    result = run_with(None)
    assert result.exit_code == 0 and "nothing to compare with" in result.output
    told = json.loads(run_with(None, "--json").output)
    assert told["rows"] == 60 and told["equal"] is None and told["rows_spark"] is None


@pytest.mark.slow
@pytest.mark.timeout(240)
@pretending
def test_the_pipeline_of_the_document_runs_as_printed(
    run: Run, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, own = (
        block.code for block in blocks(SPARK, "Your own Parquet files") if block.language == "python"
    )
    text = (ROOT / SPARK).read_text(encoding="utf-8")
    (line,) = re.findall(r"^    minishuffle (pipeline run my\.py.*)$", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "started_spark", lambda *_: contextlib.nullcontext(spark))
    exec(inputs, {})
    # The session may have begun in another directory than this one.
    (tmp_path / "my.py").write_text(own.replace('parquet("', f'parquet("{tmp_path}/'))
    ran = run(*line.split(), "--output", str(tmp_path / "out"))
    assert ran.exit_code == 0, ran.output
    result = pq.read_table(tmp_path / "out" / "minishuffle").to_pydict()
    assert (sum(result["shown"]), sum(result["clicks"])) == (600, 300)
    assert sum(cents or 0 for cents in result["cents"]) == sum(range(300))
    assert len(result["ad"]) == 70
    shown = re.search(r"^    (ad +window_start.*)\n((?:    ad\d.*\n)+)", text, re.MULTILINE)
    assert shown is not None
    assert shown[1].split() in [printed.split() for printed in ran.stdout.splitlines()]
    for row_shown in shown[2].splitlines():  # Rows come in no particular order, and only some are shown.
        ad, day, hour, *_, number, clicks, cents = row_shown.split()
        rows = [dict(zip(result, row, strict=True)) for row in zip(*result.values(), strict=True)]
        (row,) = (
            r for r in rows if (r["ad"], f"{r['window_start']:%Y-%m-%d %H:%M:%SZ}") == (ad, f"{day} {hour}")
        )
        assert (row["shown"], row["clicks"], row["cents"]) == (int(number), int(clicks), int(cents))
