"""What goes wrong in a pipeline of the user's own is told as theirs; no Spark is needed to say so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import types as t

from minishuffle import Table
from minishuffle.cli.loading import load_pipeline
from minishuffle.cli.pipeline import reported, stats_of
from minishuffle.errors import ShuffleError, UnknownName, UsageError
from minishuffle.pipelines import DataDirectory, Input, Pipeline
from minishuffle.pipelines.pipeline import asked, check_name
from minishuffle.pipelines.run import Outcome, checked_inputs, job_of, judged, slots_warning
from minishuffle.spark.session import SparkFailed

pytestmark = pytest.mark.extra

NOTHING: Any = None
DATA = DataDirectory(Path())
OWN = """
from minishuffle.errors import UnknownName
from minishuffle.pipelines import Input, Pipeline
from pyspark.errors import AnalysisException

class Own(Pipeline):
    name = "own"

    def inputs(self, spark, data):
        return self.ratio(0)

    def job(self, streams):
        return streams["a"].event_time(3)

    def expected(self, spark, data):
        raise AnalysisException("[UNRESOLVED_COLUMN] there is no 'x'\\nin a plan of\\nmany lines")

    def ratio(self, n):
        return 1 / n

own = Own()
"""


class Frame(DataFrame):
    """A DataFrame as far as its columns: it needs no Spark."""

    def __new__(cls, *kinds: t.DataType) -> Frame:
        return object.__new__(cls)

    def __init__(self, *kinds: t.DataType) -> None:
        self._kinds = t.StructType([t.StructField(f"c{n}", kind) for n, kind in enumerate(kinds)])

    @property
    def schema(self) -> t.StructType:
        return self._kinds

    @property
    def columns(self) -> list[str]:
        return self._kinds.names


class Given(Pipeline):
    """Whose methods return what they are told."""

    name = "given"

    def __init__(self, job: Any = None, others: Any = None) -> None:
        self._job, self._others = job, others

    def inputs(self, spark: Any, data: DataDirectory) -> Any:
        return {"a": Input(Frame(t.LongType()), ("c0",)), "b": Input(Frame(t.LongType()), ("c0",))}

    def job(self, streams: Mapping[str, Table]) -> Any:
        return self._job(streams)

    def expected(self, spark: Any, data: DataDirectory) -> Any:
        return self._others

    report = stats = lambda self, result: self._others


OUTCOME = Outcome(NOTHING, None, 0, 0, 0.0, 0.0)


@pytest.fixture
def own(tmp_path: Path) -> Pipeline:
    (tmp_path / "own.py").write_text(OWN)
    return load_pipeline(f"{tmp_path}/own.py:own").build()


def test_what_a_method_raises_is_told_with_the_users_own_frames(own: Pipeline) -> None:
    with pytest.raises(ShuffleError) as caught:
        checked_inputs(own, NOTHING, DATA)
    first, *frames = str(caught.value).splitlines()
    assert first == "pipeline own: inputs() raised ZeroDivisionError: division by zero"
    files = [line for line in frames if line.startswith("  File ")]
    assert len(files) == 2 and all("own.py" in line for line in files)
    assert "in inputs" in files[0] and "in ratio" in files[1]
    assert type(caught.value) is ShuffleError


def test_a_mistake_with_a_stream_keeps_its_kind_and_names_the_line(own: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        asked(own, "job", {"a": Table.from_arrow(pa.table({"a": [1]}))})
    assert str(caught.value).startswith(f"pipeline own: job(), {tmp_path}/own.py:13: ")
    with pytest.raises(ShuffleError, match=r"job\(\) raised KeyError: 'a'"):
        asked(own, "job", {})


def test_what_spark_refuses_is_one_sentence_with_the_line(own: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(SparkFailed) as caught:
        judged(own, NOTHING, DATA, NOTHING, "")
    text = str(caught.value)
    assert text.startswith(f"pipeline own: expected(), {tmp_path}/own.py:16: ") and "there is no 'x'" in text
    assert "\n" not in text
    assert isinstance(caught.value.__cause__, AnalysisException)


@pytest.mark.parametrize("name", [None, 3, "", " ", "a/b", "..", ".", "../up", "a\nb"])
def test_a_name_that_is_no_name_is_refused(name: Any) -> None:
    pipeline = Given()
    pipeline.name = name
    with pytest.raises(UsageError, match=r"^Given\.name ") as caught:
        check_name(pipeline)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"^Given\.name "):
        checked_inputs(pipeline, NOTHING, DATA)


@pytest.mark.parametrize("name", ["clicked-ads", "Mängel 2.0", "..."])
def test_a_plain_name_will_do(name: str) -> None:
    pipeline = Given()
    pipeline.name = name
    check_name(pipeline)
    assert pipeline.name == name


@pytest.mark.parametrize(
    "job, problem",
    [
        (lambda streams: streams["a"], "pipeline given: job() does not use the input 'b'"),
        (
            lambda streams: streams["a"].union(streams["b"], Table.from_spark("d", {"c0": "int64"})),
            "pipeline given: job() reads the stream 'd', which is no input",
        ),
        (lambda streams: streams["a"].key_by("c0"), "job must return a Table, not KeyedTable"),
    ],
)
def test_a_job_of_other_streams_is_refused(job: Any, problem: str) -> None:
    pipeline = Given(job)
    with pytest.raises(UsageError, match=re.escape(problem)):
        job_of(pipeline, checked_inputs(pipeline, NOTHING, DATA), 2)


def test_a_job_of_all_inputs_will_do() -> None:
    pipeline = Given(lambda streams: streams["a"].union(streams["b"]))
    stream = job_of(pipeline, checked_inputs(pipeline, NOTHING, DATA), 2)
    assert [node.is_sink for node in stream.plan.ends] == [True]


def test_a_column_that_arrow_lacks_is_named_with_its_input() -> None:
    inputs = {"a": Input(Frame(t.LongType(), t.CalendarIntervalType()), ("c0",))}
    with pytest.raises(UsageError, match="pipeline given: the input 'a': column 'c1' of type interval"):
        job_of(Given(), inputs, 2)


def test_answers_of_another_kind_are_refused() -> None:
    pipeline = Given(others=3)
    with pytest.raises(UsageError, match="given: expected must return a DataFrame or None, not int"):
        judged(pipeline, NOTHING, DATA, NOTHING, "")
    with pytest.raises(UsageError, match="given: report must return a DataFrame, not int"):
        reported(pipeline, OUTCOME)
    with pytest.raises(UsageError, match="given: stats must return a dict of name to number, not int"):
        stats_of(pipeline, OUTCOME)


def test_an_error_that_the_user_raises_as_minishuffles_own_keeps_its_kind() -> None:
    class Absent(Given):
        def inputs(self, spark: Any, data: DataDirectory) -> Any:
            raise UnknownName("there is no such file")

    with pytest.raises(
        UnknownName, match=r"given: inputs\(\), .*test_pipeline_calls\.py:\d+: there is no such file"
    ):
        checked_inputs(Absent(), NOTHING, DATA)


def test_fewer_slots_of_spark_than_splits_are_named() -> None:
    inputs: Any = {"shown": SimpleNamespace(splits=2), "clicked": SimpleNamespace(splits=1)}
    assert slots_warning(inputs, 3) is None and slots_warning({"shown": inputs["shown"]}, 1) is None
    warning = slots_warning(inputs, 2)
    assert warning is not None and "3 splits (2 of shown, 1 of clicked)" in warning
    assert warning.startswith("Spark runs 2 tasks at a time") and warning.endswith(
        "--master 'local[3]' writes all at once"
    )
