"""Rows that are objects of classes with fields: dataclasses, pydantic models and NamedTuples."""

from __future__ import annotations

import dataclasses
from typing import Any

import typing_extensions

__all__ = ["as_dicts", "field_names", "shallow"]


def field_names(given: Any) -> list[str] | None:
    """The fields of a TypedDict, NamedTuple, dataclass or pydantic model; None: it is none of them."""
    if not isinstance(given, type):
        return None
    if typing_extensions.is_typeddict(given):
        return list(getattr(given, "__annotations__", ()))
    if issubclass(given, tuple) and isinstance(names := getattr(given, "_fields", None), tuple):
        return list(names)
    if dataclasses.is_dataclass(given):
        return [field.name for field in dataclasses.fields(given)]
    models = getattr(given, "model_fields", None)  # pydantic's, which need not be imported here
    return list(models) if isinstance(models, dict) else None


def shallow(row: Any) -> dict[str, Any] | None:
    """The fields of a dataclass's or pydantic model's instance; a dict as it is; None: it is neither."""
    if isinstance(row, dict):
        return row
    names = None if isinstance(row, tuple) else field_names(type(row))
    return None if names is None else {name: getattr(row, name) for name in names}


def as_dicts(value: Any) -> Any:
    """The value with dicts in place of instances of classes with fields, at any depth."""
    if isinstance(value, tuple) and (names := field_names(type(value))) is not None:
        value = dict(zip(names, value, strict=False))
    fields = shallow(value)
    if fields is not None:
        return {name: as_dicts(each) for name, each in fields.items()}
    return [as_dicts(each) for each in value] if isinstance(value, list | tuple) else value
