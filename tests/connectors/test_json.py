"""Files of JSON objects: numbers, texts and times as they are written, and lines that are no record."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.connectors.json import JsonSource
from minishuffle.errors import UnknownName, UsageError, WrongInput
from minishuffle.limits import JSON_DEPTH_MAX
from minishuffle.operators.base import Portion


def source_of(path: Path, schema: pa.Schema | None = None, on_error: Any = "dead_letter") -> JsonSource:
    return JsonSource(path, schema, on_error=on_error)


def read(source: JsonSource) -> tuple[list[Any], list[str], int]:
    """The rows, the letters, and how many records both are of."""
    rows, letters, records = list[Any](), list[str](), 0
    for split in source.splits():
        for given in source.read(split, 0):
            is_part = isinstance(given, Portion)
            rows += (given.batch if is_part else given).to_pylist()
            letters += given.letters if is_part else ()
            records += given.records if is_part else given.num_rows
    return rows, letters, records


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('[{"n": 1}]', "it begins an array"),
        ('{"n": 1', "it is no JSON object"),
        ('{"n": 1, "n": 2}', "it has the field 'n' twice"),
        ('{"n": 1} {"n": 2', "there is more in the line than one object"),
        ("7", "it is no JSON object"),
        ("null", "it is no JSON object"),
        ('{"n": 1, "s": "\\ud800"}', "it has one half of a surrogate pair without the other"),
    ],
)
def test_a_line_that_is_no_object_is_left_out_with_the_reason(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"n": 5}}\n{line}\n{{"n": 6}}\n')
    rows, letters, records = read(source_of(tmp_path / "a.json", pa.schema({"n": pa.int64()})))
    assert ([row["n"] for row in rows], len(letters), records) == ([5, 6], 1, 3)
    assert f"record 2, byte 9: {why}" in letters[0]


def test_fields_that_are_not_declared_are_left_out_and_those_that_lack_are_null(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n": 1, "more": [1]}\n{"s": "a"}\n')
    schema = pa.schema({"s": pa.string(), "n": pa.int8()})
    assert read(source_of(tmp_path / "a.json", schema))[0] == [{"s": None, "n": 1}, {"s": "a", "n": None}]


def test_files_without_a_field_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}\n")
    with pytest.raises(UnknownName, match="(?m)^the JSON files hold no field, .*: declare schema=$"):
        source_of(tmp_path / "a.json")


def test_an_integer_of_json_that_no_float_holds_is_left_out_at_any_depth_and_infinity_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text(
        f'{{"n":[{{"x":1.5}}]}}\n{{"n":[{{"x":{"9" * 400}}}]}}\n{{"n":[{{"x":-Infinity}}]}}\n'
    )
    schema = pa.schema({"n": pa.list_(pa.struct({"x": pa.float64()}))})
    rows, letters, count = read(source_of(tmp_path / "a.json", schema))
    assert (rows, count) == ([{"n": [{"x": 1.5}]}, {"n": [{"x": float("-inf")}]}], 3)
    assert re.search("record 2, byte 18: it has 9{40}, which no float64 holds: ", letters[0])


def test_a_text_of_json_that_is_not_utf8_fits_bytes_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"n":1,"s":"\xe9"}\n')
    assert read(source_of(tmp_path / "a.json", pa.schema({"s": pa.binary()})))[0] == [{"s": b"\xe9"}]
    rows, letters, _ = read(source_of(tmp_path / "a.json", pa.schema({"n": pa.int64(), "s": pa.string()})))
    assert (rows, len(letters)) == ([], 1)
    assert "column 's' has \"\ufffd\", which does not fit string" in letters[0]


def test_a_time_of_json_with_a_zone_does_not_fit_a_type_without(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n": "2026-01-01T00:00:00+02:00"}\n')
    with pytest.raises(
        WrongInput, match=r"line 1: column 'n' has \"2026-01-01T00:00:00\+02:00\", which does "
    ):
        read(source_of(tmp_path / "a.json", pa.schema({"n": pa.timestamp("us")}), "fail"))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['{"n": 1}', '{"n": "x"}'], "line 2: column 'n' has a text, x, and a number in line 1: correct the"),
        (['{"n": true}', "", '{"n": 1}'], "line 3: column 'n' has a number, 1, and a truth value in line 1"),
        (
            ['{"n": [{"x": 1}]}', '{"n": [{"x": {}}]}'],
            r"line 2: column 'n\.\[\]\.x' has an object, {}, and a ",
        ),
    ],
)
def test_values_of_json_that_have_no_type_in_common_are_named(
    lines: list[str], why: str, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text("\n".join(lines))
    for on_error in ("fail", "skip"):
        with pytest.raises(
            WrongInput, match=rf"a\.json, {why}.*declare with schema= what the column is to be"
        ):
            source_of(tmp_path / "a.json", None, on_error)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            ['{"n": 1}', '{"n": null}\n{"n": "x"}'],
            r"1\.json, line 2: column 'n' has a text, x, and a number ",
        ),
        (['{"n": []}', '{"n": {}}'], r"1\.json, line 1: column 'n' has an object, {}, and a list "),
        (
            ['{"k": true, "n": [1]}', '{"k": 2, "n": []}\n\n{"n": [[]]}'],
            r"1\.json, line 3: column 'n\.\[\]' has a list, \[\], ",
        ),
    ],
)
def test_values_of_json_in_two_files_that_have_no_type_in_common_are_named(
    files: list[str], why: str, on_error: str, tmp_path: Path
) -> None:
    for number, text in enumerate(files):
        (tmp_path / f"{number}.json").write_text(text)
    with pytest.raises(WrongInput, match=rf"{why}.*in line 1 of .*0\.json: correct .*declare with schema="):
        JsonSource(tmp_path, on_error=on_error)  # type: ignore[arg-type]


def test_objects_may_go_over_lines_and_null_may_be_one_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"n": [\nnull\n]}\n{\n  "n": [\n    1.5,\n    Infinity,\nnull\n  ]\n}\n'
    )
    for schema in (None, pa.schema({"n": pa.list_(pa.float64())})):
        assert read(source_of(tmp_path / "a.json", schema, "fail"))[0] == [
            {"n": [None]},
            {"n": [1.5, float("inf"), None]},
        ]


def test_numbers_that_no_type_holds_are_found_behind_records_that_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"n":\n{{"n":1.5}}\n{{"n":{2**53 + 1}}}\n')
    with pytest.raises(UsageError, match=r"a\.json, line 3: column 'n' has 9007199254740993"):
        source_of(tmp_path / "a.json", None, "skip")


# --- nesting ----------------------------------------------------------------------------------------


def nested(depth: int, unit: str = "[") -> str:
    return '{"n": 2, "x": ' + unit * (depth - 1) + "]" * (depth - 1) + "}"


DEEPER: dict[str, str] = {
    "one more level": nested(JSON_DEPTH_MAX + 1),
    "many more": nested(20_000),
    "no end": '{"n": 2, "x": ' + "[" * 20_000,
    "objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "after brackets in texts": '{"s": "' + "]}" * 20_000 + '\\\\", "t": "\\"]", "x": ' + nested(20_000) + "}",
}


@pytest.mark.parametrize("name", DEEPER)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("schema", [None, pa.schema({"n": pa.int64()})])
def test_what_is_nested_too_deeply_is_left_out_or_named(
    name: str, line_end: str, schema: pa.Schema | None, tmp_path: Path
) -> None:
    """pyarrow would end the process."""
    lines = ['{"n": 1}'] * 400
    (tmp_path / "a.json").write_bytes(line_end.join([*lines, DEEPER[name], *lines, ""]).encode())
    rows, letters, records = read(source_of(tmp_path / "a.json", schema))
    assert ([row["n"] for row in rows], len(letters), records) == ([1] * 800, 1, 801)
    why, place = "it is nested more than 8,192 levels deep: ", 400 * (8 + len(line_end))
    assert f"record 401, byte {place}: {why}" in letters[0]
    with pytest.raises(WrongInput, match=rf"a\.json, line 401: {why}"):
        read(source_of(tmp_path / "a.json", schema, "fail"))


def test_what_is_not_nested_too_deeply_is_read_however_long_it_is(tmp_path: Path) -> None:
    wide = '{"n": 3, "x": [' + ", ".join(['{"a": [1]}'] * JSON_DEPTH_MAX) + "]}"
    brackets = '{"n": 4, "s": "' + "[" * 20_000 + '"}'
    many = '{"n": 5, "x": [' + ",\n".join("1" * 9_000) + "]}"
    lines = [nested(JSON_DEPTH_MAX), wide, brackets, many, ""]
    (tmp_path / "a.json").write_text("\n".join(lines))
    found = read(source_of(tmp_path / "a.json", pa.schema({"n": pa.int64()}), "fail"))
    assert found == ([{"n": n} for n in (2, 3, 4, 5)], [], 4)


def test_types_that_are_nested_too_deeply_to_be_found_are_to_be_declared(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(nested(1_200))
    with pytest.raises(UsageError, match="nested too deeply for their types to be found: declare the fields"):
        source_of(tmp_path / "a.json")
    bad = nested(1_200).replace('"n": 2', '"n": "x"')
    (tmp_path / "a.json").write_text(bad)
    _, letters, _ = read(source_of(tmp_path / "a.json", pa.schema({"n": pa.int64()})))
    assert "it is nested too deeply to be looked at, and something is wrong with it" in letters[0]
