"""State as tables: of rows and of columns, by window, of one key; and what is asked for that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.config import create_secret, default_secret_file, default_state_dir
from minishuffle.errors import UnknownName, UntrustedSnapshot, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Operator, TaskContext, Watermark
from minishuffle.operators.distinct import Distinct
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.interval_join import IntervalJoin
from minishuffle.operators.join_columns import JoinColumns
from minishuffle.operators.join_inputs import Bounds
from minishuffle.operators.join_results import ColumnResults, RowResults
from minishuffle.operators.keyed_process import ProcessRows
from minishuffle.operators.state_parts import by_rows, versioned
from minishuffle.operators.top_n import TopN
from minishuffle.operators.window_assigner import tumbling
from minishuffle.operators.windows import Panes, WindowFold, WindowOperator
from minishuffle.snapshots.sealedmanifest import SavedOperator
from minishuffle.snapshots.statetable import SavedState, read_state
from minishuffle.snapshots.storage import folder_at
from support.batches import as_item
from support.reducing import aggregating, counting, counting_columns, folding
from support.savedjobs import SECRET, save, save_parts

T = EventTime(column="t")
COLUMNS = pa.RecordBatch.from_pydict({"k": ["a", "b", "a"], "g": [1, 2, 1], "v": [5, 6, 7], "t": [1, 2, 3]})
RIGHT = COLUMNS.rename_columns(["k2", "g2", "v2", "t2"])
Saved = Callable[..., SavedState]


def rows(*pairs: tuple[Any, Any]) -> Batch:
    return Batch([row for _, row in pairs], [key for key, _ in pairs])


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """The state of an operator that has taken some items, by input."""

    def made(
        operator: Operator, *items: tuple[Any, int], keys: Sequence[str] = (), outputs: Sequence[str] = ()
    ) -> SavedState:
        operator.open(TaskContext("job", "task", 0, 1, 1))
        for item, input in items:
            given = as_item(item)
            if isinstance(given, Batch):
                operator.process(given, input, lambda _: None)
            else:
                operator.on_mark(given, input, lambda _: None)
        described = SavedOperator("id-1", "op", "kind", tuple(keys), tuple(outputs))
        save_parts(folder_at(tmp_path), described, operator.write_state())
        return read_state(tmp_path, trust=True)

    return made


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["a", "b", "a"], {"key": ["a", "b"], "value": [2, 1]}),
        ([1, 2.5, 1], {"key": [1.0, 2.5], "value": [2, 1]}),
        ([("a", 1), ("b", 2), ("a", 1)], {"key0": ["a", "b"], "key1": [1, 2], "value": [2, 1]}),
        ([("a",), None, ("a",)], {"key": [["a"], None], "value": [2, 1]}),
        (["a", 2, "a"], {"key": ["'a'", "2"], "value": [2, 1]}),
    ],
)
def test_keys_of_python_become_columns(keys: list[Any], expected: dict[str, list[Any]], saved: Saved) -> None:
    table = saved(counting("end"), (rows(*((key, key) for key in keys)), 0)).table("op")
    assert table.to_pydict() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], pa.array([1, 2])),
        ([1.5, 2.5], pa.array([1.5, 2.5])),
        ([{"n": 1}, {"n": 2, "m": "x"}], pa.array([{"n": 1, "m": None}, {"n": 2, "m": "x"}])),
        ([[1], []], pa.array([[1], []])),
        ([datetime(2026, 1, 1, tzinfo=UTC), None], pa.array([datetime(2026, 1, 1, tzinfo=UTC), None])),
        ([{"n": 1}, "two"], pa.array(["{'n': 1}", "'two'"])),
        ([1 << 70, -1], pa.array([str(1 << 70), "-1"])),
    ],
)
def test_values_of_python_get_the_type_that_holds_them(
    values: list[Any], expected: pa.Array, saved: Saved
) -> None:
    operator = folding(lambda: None, lambda _, row: row, "end")
    table = saved(operator, (rows(*zip("ab", values, strict=True)), 0)).table("op")
    found = table.column("value").combine_chunks()
    assert found.to_pylist() == expected.to_pylist()
    assert str(found.type).replace(", tz=+00:00", ", tz=UTC") == str(expected.type) or found.type.num_fields


def test_parts_with_values_of_several_types_are_one_column(tmp_path: Path) -> None:
    parts = [
        by_rows("values", ["a"], order=[0], namespace=pa.nulls(1, pa.int64()), value=pa.array([1])),
        by_rows("values", ["b"], order=[1], namespace=pa.nulls(1, pa.int64()), value=pa.array([0.5])),
        by_rows("values", ["c"], order=[2], namespace=pa.array([0]), other=pa.array(["x"])),
    ]
    save_parts(folder_at(tmp_path), SavedOperator("id-1", "op", "fold"), parts)
    assert read_state(tmp_path, trust=True).table("op").to_pydict() == {
        "key": ["a", "b", "c"],
        "window_start": [None, None, datetime(1970, 1, 1, tzinfo=UTC)],
        "value": [1.0, 0.5, None],
        "other": [None, None, "x"],
    }


def test_keys_and_aggregates_of_columns_have_their_names(saved: Saved) -> None:
    aggregates = {"sum_v": ("v", "sum"), "mean_v": ("v", "mean"), "top": ("v", "max")}
    operator = aggregating(("k", "g"), aggregates, "end")
    state = saved(operator, (COLUMNS, 0), keys=("k", "g"), outputs=tuple(aggregates))
    found = state.table("op").to_pydict()
    assert {name: found[name] for name in ("k", "g", "sum_v", "top")} == {
        "k": ["a", "b"], "g": [1, 2], "sum_v": [12, 6], "top": [7, 6],
    }  # fmt: skip
    assert [name for name in found if name.startswith("mean_v.")] == [
        name for name in found if "mean" in name
    ]
    assert state.table("op", keys=[("b", 2)]).column("sum_v").to_pylist() == [6]


def test_without_names_columns_are_numbered(saved: Saved) -> None:
    state = saved(counting_columns(("k",), "end"), (COLUMNS, 0))
    assert state.table("id-1").to_pydict() == {"key0": ["a", "b"], "aggregate0": [2, 1]}
    assert state.table("op", keys=["a", "nobody"]).to_pydict() == {"key0": ["a"], "aggregate0": [2]}


def test_windows_have_their_start(saved: Saved) -> None:
    operator = WindowOperator(WindowFold(tumbling(5), lambda n, _: n + 1, int, Panes()), T)
    given = rows(("a", {"t": 1}), ("a", {"t": 7}), ("b", {"t": 8}), ("b", {"t": 9}))
    state = saved(operator, (given, 0), (Watermark(-5), 0))
    start = [datetime(1970, 1, 1, tzinfo=UTC), *[datetime(1970, 1, 1, 0, 0, 0, 5, UTC)] * 2]
    assert state.table("op").to_pydict() == {
        "key": ["a", "a", "b"],
        "window_start": start,
        "value": [1, 1, 2],
    }
    assert state.table("op", "progress").num_rows == 1


def test_both_sides_of_a_join_have_their_rows(saved: Saved) -> None:
    results = ColumnResults(JoinColumns(("k", "g"), ("k2", "g2"), "full"), (COLUMNS.schema, RIGHT.schema))
    operator = IntervalJoin(results, Bounds(5, 3), (T, EventTime(column="t2")))
    state = saved(operator, (COLUMNS, 0), (RIGHT.slice(0, 1), 1), keys=("k", "g"))
    with pytest.raises(UsageError, match="'op' has several kinds of state, left, right: name one with part="):
        state.table("op")
    left = state.table("op", "left").to_pydict()
    assert {name: left[name] for name in COLUMNS.schema.names} == COLUMNS.to_pydict()
    assert state.table("op", "right").select(RIGHT.schema.names).to_pydict() == RIGHT.slice(0, 1).to_pydict()
    (described,) = state.operators()
    assert {(part.name, part.by_key, part.rows) for part in described.parts} >= {
        ("left", True, 3),
        ("right", True, 1),
    }


def test_keys_that_are_columns_of_the_rows_are_shown_once(saved: Saved) -> None:
    given = COLUMNS.rename_columns(["k", "1.5", "v", "t"])
    results = ColumnResults(JoinColumns(("k",), ("k2",), "inner"), (given.schema, RIGHT.schema))
    operator = IntervalJoin(results, Bounds(5, 3), (T, EventTime(column="t2")))
    table = saved(operator, (given, 0)).table("op", "left")
    assert table.select(given.schema.names).to_pydict() == given.to_pydict()
    assert "key0" not in table.column_names


def test_rows_of_python_are_a_column(saved: Saved) -> None:
    operator = IntervalJoin(RowResults("inner"), Bounds(5, 5), (T, T))
    state = saved(operator, (rows(("a", {"t": 1}), ("b", {"t": 2})), 0))
    found = state.table("op", "left", keys=["b"])
    assert found.select(["key", "row"]).to_pylist() == [{"key": "b", "row": {"t": 2}}]


def test_the_state_of_a_process_function_has_its_timers(saved: Saved) -> None:
    def remember(row: Any, context: Any) -> list[Any]:
        context.state["seen"] = row["t"]
        context.set_timer(row["t"] + 5)
        return []

    state = saved(ProcessRows(remember, lambda at, context: [], T), (rows(("a", {"t": 1})), 0))
    names = [part.name for part in state.operators()[0].parts if part.by_key]
    assert len(names) == 2
    (values, timers) = (state.table("op", name).to_pylist() for name in names)
    assert values == [{"key": "a", "value": {"seen": 1}}]
    assert [timer["key"] for timer in timers] == ["a"]


@pytest.mark.parametrize(
    "operator", [Distinct(("k", "g")), TopN(("k", "g"), 2, "v", True)], ids=["distinct", "top_n"]
)
def test_rows_of_tables_are_columns_once(operator: Operator, saved: Saved) -> None:
    found = saved(operator, (COLUMNS, 0), keys=("k", "g")).table("op")
    assert len(set(found.column_names)) == len(found.column_names)
    assert set(zip(*found.select(["k", "g"]).to_pydict().values(), strict=True)) == {("a", 1), ("b", 2)}


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    save(folder_at(tmp_path))
    state = read_state(tmp_path, trust=True)
    with pytest.raises(
        UnknownName, match=f"^{tmp_path} has no operator 'cuont': did you mean 'count'\\? it has words, count"
    ):
        state.table("cuont")
    with pytest.raises(UnknownName, match="'count' has no part 'value': did you mean 'values'"):
        state.table("count", "value")
    assert state.table("words").to_pydict() == {}
    assert state.table("count", keys=[]).num_rows == 0
    with pytest.raises(UsageError, match="a key of type object cannot be hashed"):
        state.table("count", keys=[object()])


def test_operators_of_one_name_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    first, second = SavedOperator("a-1", "count", "reduce"), SavedOperator("b-2", "count", "reduce")
    save_parts(folder_at(tmp_path), first, [versioned("own", {"order": [0], "v": [7]})])
    state = read_state(tmp_path, trust=True)
    state._operators["b-2"] = (state.manifest.vertices[0], second)
    with pytest.raises(
        UsageError, match="several operators are called 'count': give the id of one, a-1, b-2"
    ):
        state.table("count")
    assert state.table("a-1").to_pydict() == {"v": [7]}


def test_the_secret_of_the_default_cluster_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    save(folder_at(tmp_path / "s"))
    with pytest.raises(UntrustedSnapshot, match="there is no secret here"):
        read_state(tmp_path / "s")
    file = default_secret_file(default_state_dir("default"))
    create_secret(file)
    with pytest.raises(UntrustedSnapshot, match="another secret"):
        read_state(tmp_path / "s")
    with pytest.raises(UntrustedSnapshot, match="another secret"):
        read_state(tmp_path / "s", secret_file=file)
    file.write_bytes(SECRET)
    assert [each.name for each in read_state(tmp_path / "s").operators()] == ["words", "count"]
    with pytest.raises(UsageError, match="there is no secret at"):
        read_state(tmp_path / "s", secret_file=tmp_path / "nowhere")
