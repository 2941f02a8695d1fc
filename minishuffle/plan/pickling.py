"""A chain's program as bytes, and what to tell a user whose function cannot travel."""

from __future__ import annotations

import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, islice
from types import CodeType
from typing import Any, Final, TypeVar

import cloudpickle

from minishuffle.errors import ResourceExhausted, UsageError
from minishuffle.limits import CONTROL_PAYLOAD_BYTES_MAX, KIB, MIB
from minishuffle.operators.base import ModuleSource
from minishuffle.plan.programs import ProgramSpec, pack_program

__all__ = ["copied_program", "items_that_fit", "pickle_program", "send_modules"]

T = TypeVar("T")
_CACHED: Final = type(functools.cache(lambda: None))
"""What ``functools.cache`` makes of a function."""

_FILENAME: Final = 10
"""Place of ``co_filename`` in what ``CodeType`` is called with."""

MEASURED_BYTES: Final = 256 * KIB
"""Pickled size of the items that are taken between two looks at their sum."""

_modules: dict[str, ModuleSource] = {}


def send_modules(modules: Mapping[str, ModuleSource]) -> None:
    """Have the programs that are pickled from here on take the sources of these modules along."""
    _modules.update(modules)


def pickle_program(program: ProgramSpec, name: str) -> bytes:
    """The program of the vertex ``name`` as bytes, what is the user's cloudpickled.

    Functions of ``__main__`` and of modules registered with ``cloudpickle.register_pickle_by_value``
    travel by value, those of other modules by name. What :func:`send_modules` was given goes along.

    Raises:
        UsageError: a part cannot be pickled; names the operator, what it holds, and the fix.
    """
    try:
        return pack_program(replace(program, modules=dict(_modules)), _pickled)
    except Exception as error:  # whatever the user's own objects raise when they are pickled
        raise UsageError(_explanation(program, name, error)) from error


def copied_program(program: ProgramSpec, name: str) -> ProgramSpec:
    """The same with what is the user's copied, as a worker has it: what a run in this process changes in it
    is not in the job.

    Raises:
        UsageError: as :func:`pickle_program`.
    """
    try:
        copy: ProgramSpec = cloudpickle.loads(_pickled(program))
    except Exception as error:  # whatever the user's own objects raise when they are pickled
        raise UsageError(_explanation(program, name, error)) from error
    return copy


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Sends functions with a cache along as cloudpickle does others; by itself it would send their name. Code
    keeps the name of its file, for tracebacks and profiles; from 3.1.3 on cloudpickle takes it out."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            make, arguments = self.dispatch_table[CodeType](obj)
            return make, (*arguments[:_FILENAME], obj.co_filename, *arguments[_FILENAME + 1 :])
        if isinstance(obj, _CACHED) and _travels_by_value(obj):
            return _with_cache, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _travels_by_value(function: Any) -> bool:
    """Whether it is of a module that does, or is not found under its name."""
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    module = function.__module__ or "__main__"
    packages = accumulate(module.split("."), lambda package, name: f"{package}.{name}")
    found: Any = sys.modules.get(module)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not function or not by_value.isdisjoint(packages)


def _with_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """With an empty one."""
    return functools.lru_cache(**parameters)(function)


def _pickled(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _explanation(program: ProgramSpec, name: str, error: Exception) -> str:
    parts: list[tuple[str, Any]] = [(f"the source of {name!r}", program.source)]
    for label, spec in program.operators:
        parts += [(f"operator {label!r}", held) for held in spec.parameters.values()]
    parts += [("the function of partition()", output.choose) for output in program.outputs]
    for what, part in parts:
        reason = _failure(part)
        if reason is not None:
            held = _innermost(part)
            return (
                f"{what} cannot be sent to the workers: {reason}"
                + (f" (in {held})" if held else "")
                + ": create it inside the function, or in open() of a source or sink of your own"
            )
    return f"{name!r} cannot be sent to the workers: {error}"


def _failure(value: Any) -> str | None:
    """Why a value cannot be pickled, or None if it can."""
    try:
        _pickled(value)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _innermost(part: Any) -> str:
    """Where the first thing that cannot be pickled is held, for example ``variable 'lock' of parse``."""
    found, value = "", part
    for _ in range(8):  # an object may hold itself
        for where, held in _held_by(value):
            if _failure(held) is not None:
                found, value = where or found, held
                break
        else:
            break
    return found


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value refers to, with words for where; an operator's own attributes have none."""
    if inspect.ismethod(value):
        yield "", value.__self__
        value = value.__func__
    if inspect.isfunction(value):
        yield from _variables(value)
        return
    is_ours = type(value).__module__.startswith(("minishuffle.operators.", "minishuffle.connectors."))
    for name, held in getattr(value, "__dict__", {}).items():
        yield "" if is_ours else f"attribute {name!r} of a {type(value).__name__}", held


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    variables = inspect.getclosurevars(function)
    for name, held in {**variables.globals, **variables.nonlocals}.items():
        yield f"variable {name!r} of {function.__name__}", held
    for held in function.__defaults__ or ():
        yield f"a default of {function.__name__}", held


# --- Items in memory ------------------------------------------------------------------------------


class _Tally(io.RawIOBase):
    """A file that counts the bytes written to it and keeps none of them."""

    size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.size += len(data)
        return len(data)


def items_that_fit(items: Iterable[T]) -> list[T]:
    """The items as a list. No more of them are taken than a job can carry.

    Raises:
        ResourceExhausted: they do not fit: known before the first is taken if their ``len`` says so, else as
            soon as what was taken does not fit.
        UsageError: an item cannot be pickled.
    """
    _check_length(items)
    taken: list[T] = []
    with _Tally() as tally:
        # One pickler: an object that comes again is a reference, as it is in the job.
        pickler = _Pickler(tally)
        source, count, corrected = iter(items), 1, 0
        while chunk := list(islice(source, count)):
            before = tally.size
            _dump_items(pickler, chunk, len(taken))
            taken += chunk
            if tally.size - corrected > CONTROL_PAYLOAD_BYTES_MAX:
                # The sum has a little too much: a header for each chunk, and longer references.
                size = _pickled_size(taken)
                if size > CONTROL_PAYLOAD_BYTES_MAX:
                    number, each = f"{len(taken):,}", f"{size / len(taken):,.1f} bytes each"
                    raise ResourceExhausted(
                        f"Stream.items has taken {number} of its items: at {each} they are {_too_much(size)}"
                    )
                corrected = tally.size - size
            fitting = MEASURED_BYTES * len(chunk) // (tally.size - before)
            count = max(1, min(fitting, 2 * len(chunk)))
    return taken


def _pickled_size(value: Any) -> int:
    with _Tally() as tally:
        _Pickler(tally).dump(value)
        return tally.size


def _check_length(items: Iterable[Any]) -> None:
    """Each item takes one byte at least."""
    try:
        length = len(items)  # type: ignore[arg-type]  # Not all have one.
        number = f"{length:,}"
    except TypeError:
        return
    except OverflowError:
        length = sys.maxsize
        number = f"over {length:,}"
    if length > CONTROL_PAYLOAD_BYTES_MAX:
        raise ResourceExhausted(
            f"Stream.items was given {number} items: at 1 byte each, which is the least, they are "
            f"{_too_much(length)}"
        )


def _too_much(size: int) -> str:
    return (
        f"{size / MIB:,.1f} MiB, and a job carries at most {CONTROL_PAYLOAD_BYTES_MAX / MIB:.0f} MiB: make "
        "them on the workers with Stream.generate(fn), or read them there with Stream.source(...)"
    )


def _dump_items(pickler: _Pickler, chunk: list[Any], first: int) -> None:
    """Raises:
    UsageError: one of them cannot be pickled; the first has the number ``first``."""
    try:
        pickler.dump(chunk)
    except Exception as error:  # whatever the user's own objects raise when they are pickled
        for number, item in enumerate(chunk, first):
            reason = _failure(item)
            if reason is not None:
                held = _innermost(item)
                raise UsageError(
                    f"item {number:,} of Stream.items cannot be sent to the workers: {reason}"
                    f"{f' (in {held})' if held else ''}: make it there, in a function"
                ) from error
        raise UsageError(f"the items of Stream.items cannot be sent to the workers: {error}") from error
