"""Programs as bytes, and what a user is told whose function cannot travel."""

from __future__ import annotations

import functools
import socket
import sys
import threading
import types

import cloudpickle
import pytest

from minishuffle.dataflow.compile import compile_job
from minishuffle.dataflow.operators.base import Program
from minishuffle.dataflow.stream import Stream
from minishuffle.errors import UsageError


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
    with pytest.raises(UsageError, match="the source of 'items -> collect'"):
        compile_job(Stream.items([lock]).collect())
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
    program: Program = cloudpickle.loads(graph.vertices[0].program)
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
    program: Program = cloudpickle.loads(graph.vertices[0].program)
    double, lookup, more, length = (operator.fn for operator in program.operators[:4])  # type: ignore[attr-defined]
    assert (double(21), double.cache_parameters()["maxsize"]) == (42, 7)
    assert lookup(3) == 6 + 6 + 55
    assert more(1) == 2
    assert length("abc") == 3
