"""Records are the same wherever a file is cut, and those of CSV are pyarrow's."""

from __future__ import annotations

import io
import re

import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minishuffle.connectors.filerecords import CsvRecords, JsonLines, Splitter, line_at, record_blocks

CSV_BYTES = st.text(alphabet='a,"\n\r', max_size=24).map(str.encode)
JSON_BYTES = st.text(alphabet="{} \n\r", max_size=24).map(str.encode)


def whole(splitter: Splitter, data: bytes) -> list[tuple[int, int]]:
    return list(splitter.spans(data))


def in_blocks(splitter: Splitter, data: bytes, size: int) -> list[int]:
    """Where records begin, in blocks of that size."""
    starts = []
    for block in record_blocks(io.BytesIO(data), splitter, size):
        assert data.startswith(block.data, block.offset)
        spans = [(0, 0)] if block.is_cut else splitter.spans(block.data)
        starts += [block.offset + start for start, _ in spans]
    return starts


SIZES = st.integers(1, 30)


@given(data=CSV_BYTES, size=SIZES)
@example(data=b'"axba\rbb",\nb\n\n,x\n"b\n', size=2)
@example(data=b'""""\n"a"""\n', size=3)
def test_records_of_csv_do_not_depend_on_blocks(data: bytes, size: int) -> None:
    splitter = CsvRecords(",")
    assert in_blocks(splitter, data, size) == [start for start, _ in whole(splitter, data)]


@given(data=JSON_BYTES, size=SIZES)
@example(data=b"  ", size=1)
@example(data=b"   {\n}", size=1)
def test_records_of_json_do_not_depend_on_blocks(data: bytes, size: int) -> None:
    lines = [line.start() for line in _json_lines(data)]
    assert [start for start, _ in whole(JsonLines(), data)] == lines
    if b"\r" not in data:
        starts = in_blocks(JsonLines(), data, size)  # behind blanks, where a block has ended in them
        assert [data.count(b"\n", 0, each) for each in starts] == [
            data.count(b"\n", 0, each) for each in lines
        ]


def _json_lines(data: bytes) -> list[re.Match[bytes]]:
    return [line for line in re.finditer(rb"[^\r\n]+", data) if line[0].strip()]


@given(records=st.lists(CSV_BYTES.filter(lambda data: b"," not in data), max_size=6))
def test_records_of_csv_are_those_of_pyarrow(records: list[bytes]) -> None:
    data = b"\n".join(records) + b"\n"
    splitter = CsvRecords(",")
    spans = whole(splitter, data)
    if not spans or splitter.is_open(data[spans[-1][0] :]):
        return
    values = pa_csv.read_csv(
        io.BytesIO(data),
        read_options=pa_csv.ReadOptions(column_names=["a"], use_threads=False),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(column_types={"a": pa.string()}),
    )
    assert values.num_rows == len(spans)


@pytest.mark.parametrize("delimiter", [";", "\t", "|", "^", "]", "-"])
def test_any_delimiter(delimiter: str) -> None:
    data = f'"a\n"{delimiter}"b\n"\nc\n'.encode()
    assert [data[start:end] for start, end in whole(CsvRecords(delimiter), data)] == [data[:-2], b"c\n"]


@pytest.mark.parametrize(
    ("record", "is_open"), [(b'1,"a', True), (b'1,"a""', True), (b'1,"a"', False), (b'1,a"', False)]
)
def test_a_record_is_open_in_the_middle_of_a_quoted_value(record: bytes, is_open: bool) -> None:
    assert CsvRecords(",").is_open(record) == is_open


def test_quotation_marks_inside_of_values_are_none() -> None:
    assert whole(CsvRecords(","), b'5" pipe\nx"\ny\n') == [(0, 8), (8, 11), (11, 13)]
    assert CsvRecords(",").end(b'5" pipe,"a\n"\nx"\n"y\n') == 16


@pytest.mark.parametrize(
    ("data", "offset", "line"), [(b"a\nb", 0, 1), (b"a\nb", 2, 2), (b"a\r\nb", 3, 2), (b"a\rb", 2, 2)]
)
def test_lines(data: bytes, offset: int, line: int) -> None:
    assert line_at(io.BytesIO(data), offset) == line


def test_a_byte_order_mark_is_in_no_record() -> None:
    (block,) = record_blocks(io.BytesIO(b"\xef\xbb\xbfa\n"), JsonLines(), 100)
    assert (block.offset, block.data) == (3, b"a\n")
