"""A chain's program as bytes, and what to tell a user whose function cannot travel."""

from __future__ import annotations

import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import cloudpickle

from minishuffle.dataflow.operators.base import ModuleSource, Program
from minishuffle.errors import UsageError

__all__ = ["pickle_program", "send_modules"]

_modules: dict[str, ModuleSource] = {}


def send_modules(modules: Mapping[str, ModuleSource]) -> None:
    """Have the programs that are pickled from here on take the sources of these modules along."""
    _modules.update(modules)


def pickle_program(program: Program, name: str) -> bytes:
    """Cloudpickle the program of the vertex ``name``.

    Functions of ``__main__`` and of modules registered with ``cloudpickle.register_pickle_by_value``
    travel by value, those of other modules by name. What :func:`send_modules` was given goes along.

    Raises:
        UsageError: a part cannot be pickled; names the operator, what it holds, and the fix.
    """
    program.modules = dict(_modules)
    try:
        return _pickled(program)
    except Exception as error:  # whatever the user's own objects raise when they are pickled
        raise UsageError(_explanation(program, name, error)) from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Sends functions with a cache along as cloudpickle does others; by itself it would send their name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and _travels_by_value(obj):
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


def _explanation(program: Program, name: str, error: Exception) -> str:
    parts: list[tuple[str, Any]] = [(f"the source of {name!r}", program.source)]
    parts += [(f"operator {operator.name!r}", operator) for operator in program.operators]
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
    is_ours = type(value).__module__.startswith("minishuffle.dataflow.")
    for name, held in getattr(value, "__dict__", {}).items():
        yield "" if is_ours else f"attribute {name!r} of a {type(value).__name__}", held


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    variables = inspect.getclosurevars(function)
    for name, held in {**variables.globals, **variables.nonlocals}.items():
        yield f"variable {name!r} of {function.__name__}", held
    for held in function.__defaults__ or ():
        yield f"a default of {function.__name__}", held
