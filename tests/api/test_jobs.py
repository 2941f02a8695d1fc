"""Whole jobs against plain Python: programs, partitioners and elements in one thread, without a network."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.elements import decode, encode, read_header
from minishuffle.exchange.partitioner import Partitioner
from minishuffle.operators.base import Emit, Operator, Output, Program, TaskContext
from minishuffle.operators.row_conversion import rows_of
from minishuffle.plan.graph import JobGraph
from minishuffle.plan.planner import compile_job
from minishuffle.plan.programs import open_program
from minishuffle.runtime.reader import SourceReader
from support.listing import Listing

WORDS = ["to be or not to be", "that is the question", "", "to die to sleep"]
RANDOM = random.Random(7)
SALES = [
    {
        "user": f"u{RANDOM.randrange(20)}",
        "city": RANDOM.choice(["Oslo", "Rome", None]),
        "amount": i,
        "price": i / 4,
    }
    for i in range(500)
]


@dataclass
class Execution:
    """What a job did."""

    graph: JobGraph
    rows: list[Any] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    results: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Vertex name -> what ``close`` of its sink returned, by subtask."""
    records_in: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Vertex name -> records taken from exchanges, by subtask."""
    formats: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Edge -> types of the batches that crossed it."""
    queues: dict[tuple[int, int], list[Batch]] = field(default_factory=lambda: defaultdict(list))
    """(edge, consumer) -> batches."""

    def run(self) -> None:
        for number, vertex in enumerate(self.graph.vertices):
            for index in range(vertex.parallelism):
                self._run_subtask(number, index)

    def take(self, batch: Payload) -> None:
        self.rows.extend(rows_of(Batch(batch)))

    def _run_subtask(self, number: int, index: int) -> None:
        vertex = self.graph.vertices[number]
        program: Program = open_program(vertex.program, cloudpickle.loads)
        context = TaskContext(
            "j1", vertex.name, index, vertex.parallelism, 1, collect=self.take, log=self.log.append
        )
        context.files = Listing()
        stages: list[Emit] = [self._writer(program.outputs, index)]
        for operator in reversed(program.operators):
            operator.open(context)
            stages.insert(0, stage(operator, stages[0]))
        taken = 0
        for batch in self._input(number, index, program):
            taken += len(batch)
            stages[0](batch)
        for operator, following in zip(program.operators, stages[1:], strict=True):
            operator.finish(following)
        closed = [operator.close() for operator in program.operators]
        self.records_in[vertex.name].append(taken)
        self.results[vertex.name].append(closed[-1] if closed else None)

    def _input(self, number: int, index: int, program: Program) -> list[Batch]:
        if program.source is None:
            return [b for edge in self.graph.inputs_of(number) for b in self.queues.pop((edge, index), [])]
        reader = SourceReader(program.source, index, self.graph.vertices[number].parallelism, 0.0)
        return list(map(Batch, iter(lambda: reader.poll(0.0), None)))

    def _writer(self, outputs: list[Output], index: int) -> Emit:
        writers = [self._edge_writer(output, index) for output in outputs]

        def write_all(batch: Batch) -> None:
            for write in writers:
                write(batch)

        return write_all

    def _edge_writer(self, output: Output, index: int) -> Emit:
        consumers = self.graph.consumers_of(output.edge, index)
        partitioner = Partitioner(
            output.partitioner, len(consumers), output.keys, output.choose, index, columns=output.columns
        )

        def write(batch: Batch) -> None:
            self.formats[output.edge].add(_format_of(batch))
            for position, piece in partitioner.split(batch):
                self.queues[output.edge, consumers[position]].append(carried(piece))

        return write


def stage(operator: Operator, following: Emit) -> Emit:
    return lambda batch: operator.process(batch, 0, following)


def _format_of(batch: Batch) -> str:
    return type(batch.payload).__name__ if batch.keys is None else "keyed"


def carried(batch: Batch) -> Batch:
    """The batch as it comes out at the other end of an exchange."""
    rows, (header, *body) = encode(batch)
    size, rows_told, kind = read_header(header)
    payload = b"".join(body)
    assert (size, rows_told) == (len(payload), rows)
    return decode(kind, rows, payload)


def execute(stream: Stream[Any], parallelism: int = 2) -> Execution:
    """Compile a stream and run it to its end."""
    execution = Execution(JobGraph.from_bytes(compile_job(stream, parallelism=parallelism).to_bytes()))
    execution.run()
    assert not execution.queues, "records were sent to a subtask that does not exist"
    return execution


def items() -> Stream[Any]:
    return Stream.items(list(range(10)))


def sales() -> Table:
    return Table.from_arrow(pa.Table.from_pylist(SALES))


def grouped(rows: Iterable[dict[str, Any]], *keys: str) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_word_count(tmp_path: Path, parallelism: int) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("\n".join(WORDS[number:]) + "\n")
    stream = Stream.text(tmp_path).flat_map(str.split).key_by(lambda word: word).count().collect()
    done = execute(stream, parallelism)
    expected = Counter(word for number in range(3) for line in WORDS[number:] for word in line.split())
    assert len(done.rows) == len(expected)
    assert dict(done.rows) == expected


@pytest.mark.parametrize("emit", ["each", "batch", "end"])
def test_emissions_end_with_the_same_value(emit: Any) -> None:
    numbers = list(range(1000))
    stream = Stream.items(numbers).key_by(lambda number: number % 7)
    for keyed, total in [
        (stream.count(emit), lambda group: len(group)),
        (stream.reduce(lambda a, b: a + b, emit), sum),
        (stream.fold(lambda: 0, lambda a, b: a + b, emit), sum),
    ]:
        rows = execute(keyed.collect(), 3).rows
        assert len(rows) == {"each": 1000, "end": 7}.get(emit, len(rows))
        greatest: dict[int, int] = {}
        for key, value in rows:
            greatest[key] = max(value, greatest.get(key, value))
        assert greatest == {key: total([n for n in numbers if n % 7 == key]) for key in range(7)}


@pytest.mark.parametrize("as_rows", [True, False])
@pytest.mark.parametrize("keys", [("user",), ("city", "user")])
def test_aggregate(as_rows: bool, keys: tuple[str, ...]) -> None:
    source = Stream.items(SALES).to_table() if as_rows else sales()
    aggregated = source.key_by(*keys).aggregate(
        total=("amount", "sum"),
        n=("city", "count"),
        low=("price", "min"),
        high=("price", "max"),
        mid=("price", "mean"),
    )
    done = execute(aggregated.collect(), 3)
    assert done.formats[0] == {"RecordBatch"}
    found = {tuple(row[key] for key in keys): row for row in done.rows}
    groups = grouped(SALES, *keys)
    assert found.keys() == groups.keys()
    assert len(done.rows) == len(groups)
    for key, group in groups.items():
        prices = [row["price"] for row in group]
        assert found[key]["total"] == sum(row["amount"] for row in group)
        assert found[key]["n"] == sum(row["city"] is not None for row in group)
        assert (found[key]["low"], found[key]["high"]) == (min(prices), max(prices))
        assert found[key]["mid"] == pytest.approx(sum(prices) / len(prices))


def test_counts_agree_in_both_formats() -> None:
    from_rows = execute(Stream.items(SALES).key_by("user").count().collect(), 3)
    from_arrow = execute(sales().key_by("user").count().collect(), 3)
    assert from_rows.formats[0] == {"keyed"}
    assert from_arrow.formats[0] == {"RecordBatch"}
    expected = Counter(row["user"] for row in SALES)
    assert dict(from_rows.rows) == expected
    assert {row["user"]: row["count"] for row in from_arrow.rows} == expected


def test_tuples_become_arrow_by_the_declared_schema() -> None:
    pairs = [(row["user"], row["amount"]) for row in SALES]
    declared = Stream.items(pairs).to_table({"user": str, "amount": "int32"})
    done = execute(declared.key_by("user").aggregate(total=("amount", "sum")).collect())
    expected: Counter[str] = Counter()
    for user, amount in pairs:
        expected[user] += amount
    assert {row["user"]: row["total"] for row in done.rows} == expected


def test_a_schema_that_arrow_does_not_have_fails_the_job() -> None:
    with pytest.raises(UsageError, match="'amount' has the type int64, but string is declared"):
        schema = {"user": str, "city": str, "amount": str, "price": float}
        execute(sales().map_batches(lambda batch: batch, schema=schema).collect())


def test_a_union_of_what_was_rows_and_what_was_columns() -> None:
    joined = Stream.items(SALES).union(sales().to_rows(), Stream.items(SALES).parallel(1))
    users = execute(joined.map(lambda row: row["user"]).collect()).rows
    assert Counter(users) == Counter(row["user"] for row in SALES * 3)
    columns = Stream.items(SALES).to_table().union(sales(), Stream.items(SALES).parallel(1).to_table())
    done = execute(columns.key_by("user").aggregate(n=("user", "count")).collect(), 3)
    expected = {user: 3 * n for user, n in Counter(row["user"] for row in SALES).items()}
    assert {row["user"]: row["n"] for row in done.rows} == expected


def test_a_union_with_itself_doubles() -> None:
    stream = items().map(abs)
    assert sorted(execute(stream.union(stream).collect()).rows) == sorted([*range(10), *range(10)])


def test_branches_see_every_record() -> None:
    table = sales().filter(pc.bit_wise_and(pc.field("amount"), 1) == 0)
    by_user = table.to_rows().key_by("user").count().collect()
    evens = table.map_batches(lambda batch: batch.select(["amount"])).to_count().name("evens")
    done = execute(Stream.together(by_user, evens), 2)
    expected = [row for row in SALES if row["amount"] % 2 == 0]
    assert dict(done.rows) == Counter(row["user"] for row in expected)
    assert sum(done.results["map_batches -> evens"]) == len(expected)


def test_rows_and_batches_mix_with_exact_types() -> None:
    def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.field("city").type == pa.string()
        total = pa.array([2 * value for value in batch.column("amount").to_pylist()])
        return pa.RecordBatch.from_arrays([total], names=["twice"])

    nowhere = sales().to_rows().filter(lambda row: row["city"] is None)
    schema = {"user": str, "city": str, "amount": int, "price": float}
    twice = nowhere.to_table(schema).map_batches(doubled, schema={"twice": int}).to_rows()
    done = execute(twice.map(lambda row: row["twice"]).collect())
    assert sorted(done.rows) == [2 * row["amount"] for row in SALES if row["city"] is None]


@pytest.mark.parametrize("method", ["rebalance", "rescale", "forward"])
def test_every_record_arrives_once(method: str) -> None:
    chosen = getattr(Stream.items(list(range(1000))).parallel(4), method)()
    target = chosen.map(lambda row: row).name("work").parallel(4 if method == "forward" else 2)
    done = execute(target.collect())
    assert sorted(done.rows) == list(range(1000))
    if method == "rebalance":
        assert max(done.records_in["work -> collect"]) <= 2 * min(done.records_in["work -> collect"])


def test_broadcast_reaches_every_subtask() -> None:
    done = execute(items().broadcast().to_count().name("all").parallel(3))
    assert done.results["all"] == [10, 10, 10]


@pytest.mark.parametrize("source", [lambda: Stream.items(SALES), lambda: sales().to_rows()])
def test_the_user_s_choice_is_followed(source: Callable[[], Stream[Any]]) -> None:
    chosen = source().partition(lambda row, count: row["amount"] % count)
    done = execute(chosen.map(lambda row: row["amount"]).to_count().name("n").parallel(3), 3)
    assert done.records_in["map -> n"] == [167, 167, 166]


def test_dropped_records_and_dead_letters() -> None:
    def inverse(row: int) -> float:
        return 1 / row

    done = execute(items().map(inverse, on_error="dead_letter").collect(), 1)
    assert sorted(done.rows) == sorted(1 / n for n in range(1, 10))
    (line,) = done.log
    assert "ZeroDivisionError" in line and "record 0" in line
    keyed = items().key_by(inverse, on_error="skip").count().collect()
    assert len(execute(keyed).rows) == 9
    with pytest.raises(ZeroDivisionError):
        execute(items().map(inverse).collect())


def test_generated_numbers() -> None:
    rows = execute(Stream.generate(records=1000).collect(), 3).rows
    assert sorted(rows) == list(range(1000))
    arrow = execute(Table.generate(records=1000).collect(), 3).rows
    assert sorted(row["number"] for row in arrow) == list(range(1000))


def test_parquet_in_and_out(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(SALES), tmp_path / "in.parquet", row_group_size=100)
    out = tmp_path / "out"
    kept = Table.from_files(tmp_path / "in.parquet").select("user", "amount").filter(pc.field("amount") < 50)
    done = execute(kept.to_files(out), 2)
    assert sum(result["rows"] for result in done.results["parquet -> select -> filter -> to_files"]) == 50
    table = pq.read_table(out)
    assert table.schema.equals(pa.schema([("user", pa.string()), ("amount", pa.int64())]))
    assert sorted(table.to_pylist(), key=lambda row: row["amount"]) == [
        {"user": row["user"], "amount": row["amount"]} for row in SALES[:50]
    ]


def test_print_writes_into_the_log() -> None:
    assert sorted(execute(Stream.items(["b", "a"]).print()).log) == ["'a'", "'b'"]


class Lengths:
    """A sink of the user's own."""

    def open(self, context: Any) -> None:
        self.total = context.index * 1000

    def write(self, batch: Any) -> None:
        self.total += len(batch)

    def close(self) -> int:
        return self.total


def test_a_sink_of_the_user_gives_one_result_for_each_subtask() -> None:
    done = execute(items().rebalance().to(Lengths()), 2)
    assert done.results["Lengths"] == [5, 1005]
