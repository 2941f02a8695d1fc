"""Programs as bytes: plain parameters, and what is the user's by number."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import cloudpickle
import msgpack
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.operators.base import ModuleSource, Output
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.join_results import JoinedTime
from minishuffle.operators.sessions import Closing
from minishuffle.operators.window_assigner import CalendarWindows, LastMoment, SlidingWindows
from minishuffle.plan.kinds import KINDS, OperatorSpec
from minishuffle.plan.nodes import Node, running
from minishuffle.plan.planner import compile_job, logical_plan
from minishuffle.plan.programs import ProgramSpec, open_program, pack_program
from minishuffle.plan.rewrites import rewritten

HOUR = timedelta(hours=1)
SALES = pa.table({"k": [1], "t": [1], "n": [2], "l": [[1]]})


def parameters_of(given: Any, monkeypatch: Any) -> Any:
    """What comes back of one parameter."""
    monkeypatch.setitem(KINDS, "kept", lambda **parameters: _Kept(parameters))
    packed = pack_program(
        ProgramSpec(None, [("x", OperatorSpec("kept", {"given": given}))]), cloudpickle.dumps
    )
    (operator,) = open_program(packed, cloudpickle.loads).operators
    return operator.parameters["given"]  # type: ignore[attr-defined]


class _Kept:
    """Stands for an operator."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters

    def named(self, name: str, id: str) -> _Kept:
        return self


def test_parameters_come_back_as_they_were(monkeypatch: Any) -> None:
    schema = pa.schema([pa.field("a", pa.list_(pa.int8()), nullable=False), ("b", pa.uuid())], {"m": "d"})
    time = EventTime(column="t", shift=-1, each=True)
    for given in (
        None,
        -(1 << 63),
        1 << 80,
        ("a", (1.5, b"x", True)),
        {0: ("a",), 1: None},
        frozenset({"a", "b"}),
        pa.timestamp("us", "UTC"),
        time,
        (time, EventTime()),
        SlidingWindows(6, 3, 1),
        CalendarWindows("Europe/Zurich", 1, 0, 5),
        LastMoment(SlidingWindows(6, 3)),
        JoinedTime(time, EventTime(fn=len)),
        Closing(1, 5),
    ):
        assert parameters_of(given, monkeypatch) == given
    assert parameters_of(time, monkeypatch).each
    assert parameters_of(schema, monkeypatch).equals(schema, check_metadata=True)
    expression = (pc.field("a") * 2 > pc.scalar(pa.scalar(1, pa.int8()))).cast("string")
    assert parameters_of(expression, monkeypatch).equals(expression)


@pytest.mark.parametrize("kind", [pa.uuid(), pa.bool8(), pa.opaque(pa.int8(), "of", "nobody")], ids=str)
def test_a_dictionary_of_an_extension_type_comes_back_which_no_message_says(
    kind: pa.DataType, monkeypatch: Any
) -> None:
    nested = pa.list_(pa.dictionary(pa.int8(), kind))
    assert parameters_of(nested, monkeypatch) == nested
    assert parameters_of(pa.schema({"a": nested}), monkeypatch).equals(pa.schema({"a": nested}))


def test_what_two_parts_share_is_shared_where_it_runs() -> None:
    seen: list[Any] = []

    def note(row: Any) -> Any:
        seen.append(row)
        return row

    def count(row: Any, consumers: int) -> int:
        return len(seen) % consumers

    operators = [(name, OperatorSpec("map", {"fn": note, "on_error": "fail"})) for name in "ab"]
    spec = ProgramSpec(
        None, operators, [Output(0, "custom", choose=count)], {"m": ModuleSource("x", "y", False)}
    )
    program = open_program(pack_program(spec, cloudpickle.dumps), cloudpickle.loads)
    one, other = program.operators
    one.fn(3), other.fn(4)  # type: ignore[attr-defined]
    assert program.outputs[0].choose is not None and program.outputs[0].choose(0, 5) == 2
    assert (one.name, other.name, seen) == ("a", "b", [])
    assert program.modules == spec.modules


def every_kind() -> list[Node]:
    """The nodes of a job that has an operator of each kind."""
    table = Table.from_arrow(SALES).event_time("t")
    rows = table.to_rows().filter(bool).map(dict).flat_map(lambda row: [row])
    keyed, timed = rows.key_by(lambda row: row["k"]), table.to_rows().key_by("k")
    tables = [
        table.select("k", "t").rename({"k": "q"}).key_by("q").count(),
        table.explode("l").filter(pc.field("l") > 0).key_by("k").distinct(),
        table.map_batches(lambda batch: batch).union(table.drop("l")).key_by("k").aggregate(n=("n", "sum")),
        table.key_by("k").top_n(1, "n").broadcast_join(Table.from_arrow(SALES), "k"),
        table.key_by("k").join(table.key_by("k"), within=HOUR),
        table.key_by("k").asof_join(table.key_by("k")),
        table.key_by("k").window(HOUR, early=HOUR / 2).aggregate(n=("n", "max")),
        table.key_by("k").session_window(HOUR).count(),
        rows.to_table({"k": int}),
        Table.from_arrow(SALES).exchange("blocking").key_by("k").count(),
    ]
    streams = [
        keyed.count(),
        keyed.fold(int, max),
        keyed.process(lambda row, context: []),
        keyed.window(HOUR).count(),
        timed.session_window(HOUR).reduce(max),
        timed.join(keyed),
        rows.broadcast_join(Table.from_arrow(SALES).to_rows(), "k"),
        rows.map_async(_awaited, concurrency=1).parallel(1).forward().map(dict).parallel(1),
    ]
    ends = [each.collect(str(number)) for number, each in enumerate([*tables, *streams])]
    return rewritten(logical_plan(Stream.together(*ends)))


async def _awaited(row: Any) -> Any:
    return row


def test_every_kind_is_built_from_what_crosses_the_wire() -> None:
    specs = [
        (node.label, node.step.operator(node, {})) for node in running(every_kind()) if not node.is_source
    ]
    assert {spec.kind for _, spec in specs} | {"forward", "unknown_columns"} == set(KINDS)
    program = open_program(pack_program(ProgramSpec(None, specs), cloudpickle.dumps), cloudpickle.loads)
    assert [operator.name for operator in program.operators] == [name for name, _ in specs]


def test_what_is_not_the_users_is_plain_data() -> None:
    """Of a job of columns the source and the sink alone are pickled."""
    table = Table.from_arrow(SALES).filter(pc.field("n") > 1).with_columns(m=pc.field("n") * 2)
    graph = compile_job(table.key_by("k").aggregate(n=("m", "sum")).collect())
    pickled = [cloudpickle.loads(msgpack.unpackb(vertex.program)[1]) for vertex in graph.vertices]
    names = [type(each).__name__ for held in pickled for each in held]
    assert names == ["ArrowItemsSource", "CollectSink"]


def test_an_operator_with_state_has_its_id_where_it_runs() -> None:
    table = Table.from_arrow(SALES).event_time("t").filter(pc.field("n") > 1)
    end = table.key_by("k").count().name("counts").collect()
    ids = {node.label: node.id for node in logical_plan(end) if node.step.has_state}
    assert ids["counts"] == "counts" and ids["event_time"].startswith("event_time-")
    for optimise in (None, ()):
        graph = compile_job(end, parallelism=2, optimise=optimise)
        programs = [open_program(vertex.program, cloudpickle.loads) for vertex in graph.vertices]
        found = {each.name: each.id for program in programs for each in program.operators}
        assert {name: id for name, id in found.items() if id} == ids
