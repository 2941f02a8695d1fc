"""Files of this machine and of an object store, plain and compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.connectors import files, recordfiles, text
from minishuffle.connectors.csv import CsvSource
from minishuffle.connectors.json import JsonSource
from minishuffle.connectors.parquet import ParquetSource
from minishuffle.connectors.text import TextSource
from minishuffle.errors import UnknownName, UsageError, WrongInput
from support.objectstore import object_store

LINES = [f"{number},{'x' * (number % 7)}" for number in range(1000)]
CSV = ("n,text\n" + "\n".join(LINES)).encode()
SCHEMA = pa.schema({"n": pa.int64(), "text": pa.string()})


def by_arrow(codec: str) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as out:
            out.write(data)
        packed: bytes = sink.getvalue().to_pybytes()
        return packed

    return compress


COMPRESSED: list[tuple[str, Callable[[bytes], bytes]]] = [
    (".gz", gzip.compress),
    (".bz2", bz2.compress),
    (".zst", by_arrow("zstd")),
    (".lz4", by_arrow("lz4")),
]


def values(source: Any, column: str, offset: int = 0) -> list[Any]:
    return [
        value
        for split in source.splits()
        for batch in source.read(split, offset)
        for value in batch[column].to_pylist()
    ]


@pytest.mark.parametrize(("end", "compress"), COMPRESSED, ids=[end for end, _ in COMPRESSED])
def test_a_compressed_file_is_what_it_was(
    end: str, compress: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "TEXT_SPLIT_BYTES", 100)
    (tmp_path / f"a.csv{end}").write_bytes(compress(CSV))
    path = str(tmp_path / f"a.csv{end}")
    lines = TextSource(path)
    (split,) = lines.splits()
    assert [line for batch in lines.read(split, 0) for line in batch] == ["n,text", *LINES]
    assert [line for batch in lines.read(split, 900) for line in batch] == LINES[899:]
    assert CsvSource(path).schema == SCHEMA
    assert values(CsvSource(path, SCHEMA), "n") == list(range(1000))
    assert values(CsvSource(path, SCHEMA), "n", 990) == list(range(990, 1000))
    objects = "".join(json.dumps({"n": number}) + "\n" for number in range(50)).encode()
    (tmp_path / f"a.json{end}").write_bytes(compress(objects))
    assert values(JsonSource(tmp_path / f"a.json{end}"), "n", 40) == list(range(40, 50))


def test_members_of_a_gzip_file_follow_each_other_and_an_empty_one_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\r\nt") + gzip.compress(b"wo\n"))
    (tmp_path / "b.gz").write_bytes(gzip.compress(b""))
    source = TextSource(tmp_path)
    assert [list(source.read(split, 0)) for split in source.splits()] == [[["one", "two"]], []]
    assert values(CsvSource(tmp_path / "b.gz", SCHEMA, header=False), "n") == []


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"plain text"], ids=["cut", "plain"])
def test_a_damaged_file_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(damage(gzip.compress(CSV)))
    with pytest.raises(UsageError, match=r"cannot read .*a.csv.gz: (Truncated|zlib)"):
        CsvSource(path)
    source = TextSource(path)
    with pytest.raises(UsageError, match=r"cannot read .*a.csv.gz: (Truncated|zlib)"):
        list(source.read(source.splits()[0], 0))


@pytest.mark.parametrize(("end", "compress"), COMPRESSED)
def test_a_compressed_file_whose_name_does_not_say_so_is_named(
    end: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "a.data"
    path.write_bytes(compress(CSV))
    says = rf"(?m)a\.data is compressed by \w+, which its name does not say: rename it to end with \{end}$"
    for make in (TextSource, JsonSource, CsvSource, partial(CsvSource, schema=SCHEMA, header=False)):
        with pytest.raises(WrongInput, match=says):
            values(make(path), "n")
    path.write_bytes(b"BZh9, as bzip2 begins\n")
    assert TextSource(path).splits() == [(str(path), 0, 22)]


def test_what_a_compressed_file_grows_to_is_bounded_where_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordfiles, "INFERRED_FILE_BYTES_MAX", len(CSV) - 1)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(CSV))
    assert path.stat().st_size < len(CSV) - 1
    with pytest.raises(UsageError, match=r"a.csv.gz has more than .* declare them with schema="):
        CsvSource(path)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "text": TextSource,
    "csv": lambda path: CsvSource(path, header=False, schema=pa.schema({"n": pa.int64()})),
    "json": JsonSource,
    "parquet": ParquetSource,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_file_that_has_changed_since_it_was_listed_is_not_read(kind: str, tmp_path: Path) -> None:
    """What was listed travels with the job: neither a reader on another day nor one on another machine lists
    anything, takes a file that came later, or reads what the plan was not built for."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        if kind == "parquet":
            pq.write_table(pa.table({"n": [1, 2]}), path)
        else:
            path.write_text('{"n": 1}\n' if kind == "json" else "1\n")
    source = cloudpickle.loads(cloudpickle.dumps(SOURCES[kind](tmp_path)))
    (tmp_path / "c").write_text("3\n")
    one, other = source.splits()
    assert len(list(source.read(one, 0))) == len(list(source.read(other, 0))) == 1
    before = paths[0].stat()
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns + 1000))
    paths[1].unlink()
    with pytest.raises(WrongInput, match=f"{paths[0]} has changed since the job was made"):
        next(source.read(one, 0))
    with pytest.raises(WrongInput, match=f"{paths[1]} is gone since the job was made"):
        next(source.read(other, 0))
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(list(source.read(one, 0))) == 1
    with open(paths[0], "ab") as file:
        file.write(b"\n")
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    size = before.st_size
    with pytest.raises(WrongInput, match=f"it had {size:,} bytes? of 2.* and now has {size + 1:,} bytes"):
        next(source.read(one, 0))


def test_a_uri_of_this_machine_is_its_path(tmp_path: Path) -> None:
    (tmp_path / "with a blank").mkdir()
    path = tmp_path / "with a blank" / "a.txt"
    path.write_text("one\n")
    assert files.files_of(path.as_uri()) == files.files_of((tmp_path / "with a blank").as_uri())
    assert files.files_of(path.as_uri()) == files.files_of(path)
    assert [file.path for file in files.files_of(path)] == [str(path)]
    assert files.files_below(tmp_path.as_uri()) == files.files_below(tmp_path)


@pytest.mark.parametrize(
    ("uri", "error", "says"),
    [
        ("file:///nowhere/a.csv", UnknownName, "there is no file or directory file:///nowhere/a.csv: check"),
        ("file:///nowhere/*.csv", UnknownName, r"\(patterns are for files of this machine\)"),
        ("foo://a/b", UsageError, "foo://a/b names no file system: .*write a path, or a URI such as s3://"),
    ],
)
def test_a_uri_of_nothing_is_refused(uri: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        files.files_of(uri)


READING = """
import sys
from dataclasses import replace

import cloudpickle
from minishuffle.connectors import files, hive, parquet
from minishuffle.connectors.csv import CsvSource
from minishuffle.connectors.text import TextSource
from minishuffle.errors import UnknownName, WrongInput

options = sys.argv[1]
logs = f"s3://key:secret@bucket/logs?{options}"
listed = files.files_of(logs)
found = [file.path for file in listed]
assert found == [f"s3://key:secret@bucket/logs/{name}?{options}" for name in ("a%20b.csv.gz", "c.csv")], found
source = CsvSource(found)
source = cloudpickle.loads(cloudpickle.dumps(source))
print(sum(batch.num_rows for split in source.splits() for batch in source.read(split, 0)))
days = hive.hive_files([f"s3://key:secret@bucket/days?{options}"])
table = hive.HiveSource(parquet.ParquetSource(list(days)), days, None)
print([row for split in table.splits() for batch in table.read(split, 0) for row in batch.to_pylist()])
text = TextSource(f"s3://key:secret@bucket/logs/c.csv?{options}")
print([line for split in text.splits() for lines in text.read(split, 998) for line in lines])
try:
    files.files_of(f"s3://key:secret@bucket/nothing?{options}")
except UnknownName as error:
    print(error)
for file in (*listed, *files.files_of(listed[0].path)):
    file.check_unchanged()
for file in (replace(listed[0], size=1), replace(listed[0], path=listed[0].path.replace("csv", "tsv"))):
    try:
        file.check_unchanged()
    except WrongInput as error:
        print(error)
"""


@pytest.mark.slow
def test_an_object_store_is_read_like_a_directory() -> None:
    """In a process of its own: what pyarrow starts for S3 lives until the process ends."""
    parquet = io.BytesIO()
    pq.write_table(pa.table({"n": [1, 2]}), parquet)
    objects = {
        "bucket/logs/a b.csv.gz": gzip.compress(CSV),
        "bucket/logs/c.csv": CSV,
        "bucket/logs/_hidden.csv": b"x",
        "bucket/logs/below/d.csv": b"x",
        "bucket/days/day=1/x.parquet": parquet.getvalue(),
    }
    with object_store(objects) as options:
        ran = subprocess.run(
            [sys.executable, "-c", READING, options],
            capture_output=True,
            text=True,
            timeout=120,
            env={"AWS_EC2_METADATA_DISABLED": "true"},
        )
    assert ran.returncode == 0, ran.stderr
    count, days, last, missing, changed, gone = ran.stdout.splitlines()
    assert count == "2000"
    assert days == "[{'n': 1, 'day': '1'}, {'n': 2, 'day': '1'}]"
    assert last == str(LINES[997:])
    assert missing.startswith("there is no file or directory s3://key:")
    assert re.match(
        r"s3://.*b\.csv\.gz\?.* has changed since the job was made: it had 1 byte of 2026-", changed
    )
    assert re.match(r"s3://.*b\.tsv\.gz\?.* is gone since the job was made", gone)


def test_a_column_that_is_not_utf8_is_no_bytes_unless_declared_so(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes(b"n,x\ncaf\xe9,1\nok,2\n")
    with pytest.raises(
        UsageError, match=r"latin\.csv, line 2: it is not UTF-8: 'caf\ufffd,1': convert the f"
    ):
        CsvSource(str(path), None)
    declared = CsvSource(str(path), pa.schema([("n", pa.binary()), ("x", pa.int64())]))
    (batch,) = declared.read(str(path), 0)
    assert batch.to_pylist() == [{"n": b"caf\xe9", "x": 1}, {"n": b"ok", "x": 2}]


def test_a_number_of_a_csv_file_may_be_declared_to_be_rounded(tmp_path: Path) -> None:
    path = tmp_path / "ids.csv"
    path.write_text(f"id\n1.5\n{2**53 + 1}\n")
    assert values(CsvSource(str(path), pa.schema([("id", pa.float64())])), "id") == [1.5, 2.0**53]
