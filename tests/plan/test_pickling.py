"""Programs as bytes, and what a user is told whose function cannot travel."""

from __future__ import annotations

import functools
import pickle
import socket
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Any

import cloudpickle
import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import ResourceExhausted, UsageError
from minishuffle.limits import MIB
from minishuffle.operators.base import Program
from minishuffle.plan import pickling
from minishuffle.plan.pickling import MEASURED_BYTES, items_that_fit
from minishuffle.plan.planner import compile_job
from minishuffle.plan.programs import open_program


def items() -> Stream[int]:
    return Stream.items(list(range(10)))


def test_a_lock_that_a_function_holds_is_named() -> None:
    lock = threading.Lock()

    def guarded(row: int) -> int:
        with lock:
            return row

    with pytest.raises(UsageError) as caught:
        compile_job(items().map(guarded).name("guard").collect())
    text = str(caught.value)
    assert text.startswith("operator 'guard' cannot be sent to the workers: ")
    assert "lock" in text and "variable 'lock' of guarded" in text and "create it inside" in text


def test_functions_keep_the_name_of_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those within them, and whatever cloudpickle puts in its place."""
    reduced = pickling._Pickler.dispatch_table[types.CodeType]

    def without_name(code: types.CodeType) -> Any:
        make, given = reduced(code)
        return make, tuple("<dynamic-code>" if each == code.co_filename else each for each in given)

    monkeypatch.setitem(pickling._Pickler.dispatch_table, types.CodeType, without_name)
    outer = pickle.loads(pickling._pickled(lambda: lambda: 1))
    assert [each.__code__.co_filename for each in (outer, outer())] == [__file__, __file__]


def test_a_socket_deep_inside_is_named() -> None:
    with socket.socket() as connection:

        class Lookup:
            def __init__(self) -> None:
                self.connection = connection

            def find(self, row: int) -> int:
                return row

        lookup = Lookup()
        with pytest.raises(UsageError, match=r"operator 'key_by'.*attribute 'connection' of a Lookup"):
            compile_job(items().key_by(lambda row: lookup.find(row)).count().collect())
        with pytest.raises(UsageError, match=r"operator 'map'.*attribute 'connection' of a Lookup"):
            compile_job(items().map(Lookup().find).collect())


def test_sources_sinks_and_partition_functions_are_named_too() -> None:
    lock = threading.Lock()

    class Locked:
        def __init__(self) -> None:
            self.held = lock

        def splits(self) -> list[int]:
            return [0]

        def read(self, split: int, offset: int) -> Iterator[list[int]]:
            yield []

    with pytest.raises(UsageError, match="the source of 'Locked -> collect'"):
        compile_job(Stream.source(Locked()).collect())
    with pytest.raises(UsageError, match=r"function of partition\(\).*variable 'lock'"):
        compile_job(items().partition(lambda row, count: bool(lock)).collect())
    with pytest.raises(UsageError, match=r"operator 'fold'.*a default of <lambda>"):
        compile_job(items().key_by(abs).fold(int, lambda state, row, held=lock: state).collect())


def test_a_module_registered_by_value_travels_with_its_functions() -> None:
    module = types.ModuleType("a_job_of_the_user")
    exec("def double(row):\n    return FACTOR * row\nFACTOR = 2", module.__dict__)
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        graph = compile_job(items().map(module.double).collect())
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]
    program: Program = open_program(graph.vertices[0].program, cloudpickle.loads)
    assert program.operators[0].fn(21) == 42  # type: ignore[attr-defined]


CACHED = """
import functools

FACTOR = 2

@functools.lru_cache(maxsize=7)
def double(row):
    return FACTOR * row

@functools.cache
def fibonacci(row):
    return row if row < 2 else fibonacci(row - 1) + fibonacci(row - 2)

class Lookup:
    @functools.lru_cache
    def double(self, row):
        return FACTOR * row

    def __call__(self, row):
        return self.double(row) + double(row) + fibonacci(10)
"""


def test_functions_with_a_cache_travel_as_others_do() -> None:
    module = types.ModuleType("a_job_of_the_user")
    exec(CACHED, module.__dict__)
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        steps = items().map(module.double).map(module.Lookup()).map(functools.cache(lambda row: row + 1))
        graph = compile_job(steps.map(functools.lru_cache(len)).collect())
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]
    program: Program = open_program(graph.vertices[0].program, cloudpickle.loads)
    double, lookup, more, length = (operator.fn for operator in program.operators[:4])  # type: ignore[attr-defined]
    assert (double(21), double.cache_parameters()["maxsize"]) == (42, 7)
    assert lookup(3) == 6 + 6 + 55
    assert more(1) == 2
    assert length("abc") == 3


# --- items in memory ------------------------------------------------------------------------------


class Counted:
    """Counts what is taken of an iterable."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = iter(items)
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.taken += 1
            yield item


class Sized(Counted):
    def __init__(self, length: int) -> None:
        super().__init__(repeat(None))
        self.length = length

    def __len__(self) -> int:
        return self.length


ELSEWHERE = r"Stream\.generate\(fn\), or read them there with Stream\.source\("


def test_a_length_that_cannot_fit_is_refused_before_the_first_item_is_taken() -> None:
    items = Sized(10**9)
    with pytest.raises(
        ResourceExhausted,
        match=rf"given 1,000,000,000 items: at 1 byte each.* 953\.7 MiB, .* at most 64 MiB: .*{ELSEWHERE}",
    ):
        Stream.items(items)
    assert items.taken == 0
    with pytest.raises(ResourceExhausted, match=r"was given over 9,223,372,036,854,775,807 items"):
        Stream.items(range(10**30))


@pytest.mark.parametrize(
    ("items", "each"),
    [
        (repeat("one object, which is referred to"), 2),
        ((bytes(MIB) for _ in count()), MIB),
        (({"number": number, "text": f"{number:1000}"} for number in count()), 1000),
    ],
    ids=["the same", "large", "records"],
)
def test_no_more_is_taken_than_shows_that_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, items: Iterable[Any], each: int
) -> None:
    monkeypatch.setattr("minishuffle.plan.pickling.CONTROL_PAYLOAD_BYTES_MAX", 8 * MIB)
    counted = Counted(items)
    with pytest.raises(
        ResourceExhausted,
        match=rf"taken [\d,]+ of its items: at [\d,.]+ bytes each they are 8\.\d MiB.*{ELSEWHERE}",
    ):
        Stream.items(counted)
    assert counted.taken <= 8 * MIB // each + MEASURED_BYTES // each + 2


def test_what_fits_to_the_last_byte_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [[f"{number}"] * 3 for number in range(20_000)]
    exact = len(cloudpickle.dumps(items))
    monkeypatch.setattr("minishuffle.plan.pickling.CONTROL_PAYLOAD_BYTES_MAX", exact)
    assert items_that_fit(iter(items)) == items
    monkeypatch.setattr("minishuffle.plan.pickling.CONTROL_PAYLOAD_BYTES_MAX", exact - 1)
    with pytest.raises(ResourceExhausted, match=r"taken 20,000 of its items"):
        items_that_fit(iter(items))


def test_items_that_cannot_be_sent_are_named_when_they_are_taken() -> None:
    counted = Counted(number if number < 5 else threading.Lock() for number in count())
    with pytest.raises(UsageError, match=r"item 5 of Stream\.items cannot be sent .*lock"):
        Stream.items(counted)
    assert counted.taken < 10
