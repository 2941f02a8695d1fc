"""The program of a vertex, as it crosses the wire: operators as kinds and parameters, and what is the user's.

Parameters are plain data. A schema or a type of Arrow is an IPC message, an expression what Arrow writes of
it, a value of the library (where event time stands, how windows are cut) its name and fields. Everything else
is the user's: functions, sources, sinks. These are cloudpickled together, so that what two of them share is
shared on the worker too, and stand as numbers where they are used. An operator with state has its id there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

import msgpack

from minishuffle.operators.base import ModuleSource, Output, Program
from minishuffle.plan.kinds import OperatorSpec, built

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ProgramSpec", "built_program", "open_program", "pack_program"]

_SCHEMA, _TYPE, _BLOB, _VALUE, _SET, _EXPRESSION = range(1, 7)
"""Kinds of parameters that msgpack has no form for."""

_VALUES: Final = {
    "EventTime": "minishuffle.operators.event_time",
    "SlidingWindows": "minishuffle.operators.window_assigner",
    "CalendarWindows": "minishuffle.operators.window_assigner",
    "LastMoment": "minishuffle.operators.window_assigner",
    "Closing": "minishuffle.operators.sessions",
    "JoinedTime": "minishuffle.operators.join_results",
}
"""Classes whose values are parameters, and their modules."""


@dataclass(slots=True)
class ProgramSpec:
    """What a vertex runs: a source (or None), operators with their names, and outputs."""

    source: Any = None
    operators: Sequence[tuple[str, OperatorSpec]] = ()
    outputs: Sequence[Output] = ()
    modules: Mapping[str, ModuleSource] = field(default_factory=dict)
    times: bool = True
    """See :class:`~minishuffle.operators.base.Program`."""


class _Blobs:
    """Makes a program plain values of msgpack. Objects of the user (sources, functions) go into ``objects``,
    each once, and a number, the place in this list, stands for each."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        """That of an object."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]

    def program(self, spec: ProgramSpec) -> dict[str, Any]:
        """A program without what is the user's."""
        return {
            "source": None if spec.source is None else self.number(spec.source),
            "operators": [
                [each.kind, name, self._plain(dict(each.parameters)), each.errors, dict(each.sides), each.id]
                for name, each in spec.operators
            ],
            "outputs": [self._output(output) for output in spec.outputs],
            "times": spec.times,
            "modules": {
                name: [module.text, module.path, module.is_package] for name, module in spec.modules.items()
            },
        }

    def _output(self, output: Output) -> list[Any]:
        choose = None if output.choose is None else self.number(output.choose)
        columns = None if output.columns is None else sorted(output.columns)
        return [output.edge, output.partitioner, output.keys, choose, output.side, columns, output.times]

    def _plain(self, value: Any) -> Any:
        """A parameter as msgpack takes it."""
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else self._ext(_BLOB, self.number(value))
        if kind in (tuple, list):
            return [self._plain(each) for each in value]
        if kind is dict:
            return {self._plain(key): self._plain(each) for key, each in value.items()}
        if kind is frozenset:
            return self._ext(_SET, [self._plain(each) for each in sorted(value)])
        if _VALUES.get(kind.__name__) == kind.__module__:
            held = [getattr(value, each.name) for each in fields(value)]
            return self._ext(_VALUE, [kind.__name__, *map(self._plain, held)])
        return self._of_arrow(value)

    def _of_arrow(self, value: Any) -> Any:
        """A schema, a type or an expression of Arrow; all else is the user's."""
        import pyarrow as pa

        if (type(value).__module__, type(value).__name__) == ("pyarrow._compute", "Expression"):
            _, (message,) = value.__reduce__()
            return msgpack.ExtType(_EXPRESSION, message.to_pybytes())
        if isinstance(value, pa.Schema) and (message := _message(value)):
            return msgpack.ExtType(_SCHEMA, message)
        if isinstance(value, pa.DataType) and (message := _message(pa.schema([("", value)]))):
            return msgpack.ExtType(_TYPE, message)
        return self._ext(_BLOB, self.number(value))

    @staticmethod
    def _ext(code: int, value: Any) -> msgpack.ExtType:
        return msgpack.ExtType(code, _pack(value))


def _message(schema: pa.Schema) -> bytes:
    """An IPC message; empty if another schema would be read from it: of a dictionary whose values are of an
    extension type Arrow makes that type with dictionaries for its storage."""
    import pyarrow as pa

    message: bytes = schema.serialize().to_pybytes()
    try:
        is_same = pa.ipc.read_schema(pa.py_buffer(message)).equals(schema)
    except pa.ArrowException:
        return b""
    return message if is_same else b""


def pack_program(spec: ProgramSpec, pickle: Callable[[Any], bytes]) -> bytes:
    """The program as bytes; ``pickle`` packs the list of what is the user's."""
    blobs = _Blobs()
    program = _pack(blobs.program(spec))
    return _pack([program, pickle(blobs.objects)])


def built_program(spec: ProgramSpec) -> Program:
    """A program that can run in this process: what is the user's are their own objects, and no copies."""
    operators = [built(each, name) for name, each in spec.operators]
    return Program(spec.source, operators, [*spec.outputs], spec.modules, spec.times)


def open_program(data: bytes, unpickle: Callable[[bytes], Any]) -> Program:
    """A program that can run, its operators built.

    Raises:
        Exception: whatever the user's objects raise when they are unpickled.
    """
    program, pickled = _unpack(data, msgpack.ExtType)
    blobs = unpickle(pickled)
    given = _unpack(program, _Reader(blobs))
    return Program(
        source=None if given["source"] is None else blobs[given["source"]],
        operators=[
            built(OperatorSpec(kind, held, errors, sides, id), name)
            for kind, name, held, errors, sides, id in given["operators"]
        ],
        outputs=[_output(blobs, *output) for output in given["outputs"]],
        modules={name: ModuleSource(*module) for name, module in given["modules"].items()},
        times=given["times"],
    )


def _output(blobs: Sequence[Any], edge: int, partitioner: str, *others: Any) -> Output:
    keys, choose, side, columns, times = others
    chosen = None if choose is None else blobs[choose]
    return Output(
        edge, partitioner, keys, chosen, side, None if columns is None else frozenset(columns), times
    )


class _Reader:
    """Makes parameters of what msgpack has no form for. (No closure that calls itself: it would hold the
    user's objects until the collector finds it.)"""

    def __init__(self, blobs: Sequence[Any]) -> None:
        self._blobs = blobs

    def __call__(self, code: int, held: bytes) -> Any:
        if code in (_SCHEMA, _TYPE):
            import pyarrow as pa

            schema = pa.ipc.read_schema(pa.py_buffer(held))
            return schema if code == _SCHEMA else schema.field(0).type
        if code == _EXPRESSION:
            return _expression(held)
        value = _unpack(held, self)
        if code == _BLOB:
            return self._blobs[value]
        if code == _SET:
            return frozenset(value)
        name, *arguments = value
        return getattr(importlib.import_module(_VALUES[name]), name)(*arguments)


def _expression(message: bytes) -> Any:
    """The expression of which Arrow has written that message; what reads it is known to each expression."""
    import pyarrow as pa
    import pyarrow.compute as pc

    read, _ = pc.scalar(True).__reduce__()
    return read(pa.py_buffer(message))


def _pack(value: Any) -> bytes:
    found: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
    return found


def _unpack(data: bytes, read: Callable[[int, bytes], Any]) -> Any:
    return msgpack.unpackb(
        data, ext_hook=read, use_list=False, strict_map_key=False, unicode_errors="surrogatepass"
    )
