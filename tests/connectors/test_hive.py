"""Directories whose names hold the values of columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Table
from minishuffle.errors import UnknownName, UsageError
from support.cutjobs import Cut, run

SHOPS = {"shop=01": [1, 2], "shop=__HIVE_DEFAULT_PARTITION__": [3], "shop=a%2Fb": [4]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, values in SHOPS.items():
        (tmp_path / "day=2026-01-01" / name).mkdir(parents=True)
        pq.write_table(pa.table({"n": values}), tmp_path / "day=2026-01-01" / name / "part.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    return tmp_path


def rows(table: Table) -> list[Any]:
    return sorted(run(table.collect(), Cut(2)).rows, key=lambda row: row["n"])


def test_directories_give_columns_of_texts(root: Path) -> None:
    table = Table.from_files(root, partitioning="hive")
    assert table.plan.gives.columns == ("n", "day", "shop")
    assert [(row["n"], row["day"], row["shop"]) for row in rows(table)] == [
        (1, "2026-01-01", "01"), (2, "2026-01-01", "01"), (3, "2026-01-01", None), (4, "2026-01-01", "a/b")
    ]  # fmt: skip


def test_they_have_the_types_that_are_declared(root: Path) -> None:
    table = Table.from_files(root, schema={"n": float, "day": pa.date32()}, partitioning="hive")
    assert {(type(row["n"]), str(row["day"])) for row in rows(table)} == {(float, "2026-01-01")}
    with pytest.raises(UsageError, match="shop=a/b does not fit the declared type int64"):
        Table.from_files(root, schema={"n": int, "shop": int}, partitioning="hive")


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_the_columns_of_directories_may_be_all_that_is_read(tmp_path: Path, format: Any) -> None:
    (tmp_path / "day=1").mkdir()
    path = tmp_path / "day=1" / f"x.{format}"
    if format == "parquet":
        pq.write_table(pa.table({"n": [5, 6]}), path)
    else:
        path.write_text("n\n5\n6\n" if format == "csv" else '{"n": 5}\n{"n": 6}\n')
    table = Table.from_files(tmp_path, format=format, partitioning="hive", schema={"day": int})
    assert run(table.collect()).rows == [{"day": 1}, {"day": 1}]
    if format == "csv":
        with pytest.raises(UsageError, match="without a header do not name their columns"):
            Table.from_files(tmp_path, format="csv", partitioning="hive", schema={"day": int}, header=False)


def test_what_is_no_such_tree_is_refused(root: Path) -> None:
    with pytest.raises(UnknownName, match="there is no directory .*nowhere"):
        Table.from_files(root / "nowhere", partitioning="hive")
    with pytest.raises(UsageError, match="partitioning is 'spark': write 'hive'"):
        Table.from_files(root, partitioning="spark")  # type: ignore[arg-type]
    other = root / "day=2026-01-02"
    other.mkdir()
    pq.write_table(pa.table({"n": [1]}), other / "part.parquet")
    with pytest.raises(UsageError, match=r"of different columns, \(day, shop\) and \(day\)"):
        Table.from_files(root, partitioning="hive")
    (other / "part.parquet").unlink()
    pq.write_table(pa.table({"n": [1], "shop": [2]}), root / "day=2026-01-01" / "shop=01" / "part.parquet")
    with pytest.raises(UsageError, match="column 'shop' is in the files and in the names of their"):
        Table.from_files(root, partitioning="hive")
