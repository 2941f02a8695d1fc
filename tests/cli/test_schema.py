"""The schema that ``minishuffle schema`` shows of a job's first step that has none."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from minishuffle.cli.loading import load_job
from minishuffle.cli.main import cli
from minishuffle.cli.schema import _written
from minishuffle.errors import InvalidGraph, TaskFailed, UsageError
from minishuffle.plan.schemas import arrow_schema

JOB = """\
from datetime import datetime, timedelta
import pyarrow as pa
from minishuffle import Stream

def row(number):
    return {"k": number % 3, "t": number, "x": number / 2, "at": datetime(2026, 1, 1), "none": None}

rows = Stream.generate().event_time(lambda n: n * 1_000_000)
made = rows.map(row, on_error="side")
first = made.to_table(FIRST)
hours = first.key_by("k").window(timedelta(seconds=100)).aggregate(n=("x", "sum"), last=("at", "max"))
job = hours.to_rows().map(lambda row: {"k": row["k"], "w": row["window_start"], "l": [row["n"]]}).to_table(
    SECOND
).select("k", "l").to_files(OUT)
"""
FIRST = """\
# to_table at job.py:10
# from 1,000 rows
to_table({
    "k": "int64",
    "t": "int64",
    "x": "float64",
    "at": pa.timestamp("us"),
    "none": "null",  # no row had a value: choose its type
})
"""
SECOND = """\
# to_table at job.py:12
# from 1,000 rows
to_table({
    "k": "int64",
    "w": pa.timestamp("us", "UTC"),
    "l": pa.list_(pa.float64()),
})
"""


def job(folder: Path, first: str = "", second: str = "") -> None:
    out = f"{str(folder / 'out')!r}"
    text = JOB.replace("FIRST", first).replace("SECOND", second).replace("OUT", out)
    (folder / "job.py").write_text(text)


def shown(spec: str, *options: str) -> str:
    result = CliRunner().invoke(
        cli.commands.get("schema") or cli.get_command(None, "schema"), [spec, *options]
    )  # type: ignore[arg-type]
    if result.exception is not None:
        raise result.exception
    return result.output


def schema_in(text: str) -> str:
    return text[text.index("{") : text.rindex("}") + 1]


def test_each_step_without_a_schema_is_shown_in_turn_and_no_sink_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job(tmp_path)
    with pytest.raises(
        Exception, match=r"to_table at job.py:10: .* of map have: .*`minishuffle schema job.py:JOB`"
    ):
        load_job("job.py:job")
    assert shown("job.py:job") == FIRST
    job(tmp_path, schema_in(FIRST).replace('"null"', '"int64"'))
    assert shown("job.py:job") == SECOND.replace(":12", f":{12 + FIRST.count('    ') + 1}")
    job(tmp_path, schema_in(FIRST).replace('"null"', '"int64"'), schema_in(SECOND))
    assert shown("job.py:job") == "# every step has a schema, or needs none\n"
    assert not (tmp_path / "out").exists()


def test_a_step_without_rows_has_no_schema_to_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(
        "from minishuffle import Stream\n"
        "def job(n: int):\n"
        "    return Stream.items([1] * n).filter(lambda n: n > 1).map(str).to_table().collect()\n"
    )
    with pytest.raises(UsageError, match="to_table at job.py:3 got none of the first 5 rows of each source"):
        shown("job.py:job", "--set", "n=5")
    with pytest.raises(
        InvalidGraph, match=r"to_table at job.py:3: nothing says which columns .* of map have"
    ):
        load_job("job.py:job").build(["n=5"])


ODD = """\
from minishuffle import Stream
pairs = Stream.items([{"k": 1}, {"k": 1}]).key_by("k").count().to_table().collect()
mixed = Stream.items([1, 2]).map(lambda n: {"n": n} if n > 1 else n).to_table().collect()
raises = Stream.items([0]).map(lambda n: 1 // n).to_table().collect()
errors = Stream.items([0]).map(lambda n: 1 // n, on_error="side").errors.to_table().collect()
"""
PAIRS = """\
# to_table at odd.py:2
# from 2 rows
# the rows are tuples or lists, whose values have no names: choose names
to_table({
    "column_1": "int64",
    "column_2": "int64",
})
"""


def test_rows_without_names_errors_and_functions_that_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(ODD)
    assert shown("odd.py:pairs") == PAIRS
    with pytest.raises(UsageError, match=r"^to_table at odd.py:3: Arrow takes .* and one is 1: map the rows"):
        shown("odd.py:mixed")
    with pytest.raises(TaskFailed, match=r"^first rows: ZeroDivisionError: (?s:.*) line 4, in <lambda>"):
        shown("odd.py:raises")
    assert '"record": "int64"' in shown("odd.py:errors")


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.bool_(), pa.float32(), pa.date32(), pa.binary(), pa.large_string(), pa.time64("us")),
        *(pa.duration("ms"), pa.timestamp("ns", "Europe/Paris"), pa.decimal128(5, 2), pa.decimal256(50, 1)),
        pa.struct({"a b": pa.list_(pa.bool_()), "c": pa.map_(pa.string(), pa.float64())}),
        *(pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.string(), ordered=True)),
        *(pa.uuid(), pa.bool8(), pa.json_(), pa.binary(16), pa.date64(), pa.struct([])),
        *(pa.large_list(pa.string()), pa.list_(pa.int8(), 3), pa.list_view(pa.int8())),
        pa.large_list_view(pa.list_(pa.field("element", pa.date64(), nullable=False))),
        pa.struct([pa.field("a", pa.uuid(), nullable=False)]),
        pa.struct([("a", pa.int8()), ("a", pa.binary(2))]),
        pa.map_(pa.string(), pa.field("v", pa.int8(), nullable=False), keys_sorted=True),
    ],
    ids=str,
)
def test_a_type_is_written_as_a_schema_takes_it(kind: pa.DataType) -> None:
    written = eval(_written(kind), {"pa": pa})
    assert arrow_schema({"x": written}) == pa.schema({"x": kind})
