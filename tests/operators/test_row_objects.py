"""Rows that are objects of classes with fields."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, TypedDict

import pydantic
import pytest

from minishuffle.operators.row_objects import as_dicts, field_names, shallow


class Typed(TypedDict, total=False):
    n: int
    tags: list[str]


class Named(NamedTuple):
    n: int
    kind: str | None = None


@dataclasses.dataclass
class Data:
    typed: Typed
    many: tuple[Named, ...]
    by_name: dict[str, float]
    count: ClassVar[int] = 0


class Model(pydantic.BaseModel):
    n: int
    inner: Named | None = None


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (Typed, ["n", "tags"]),
        (Named, ["n", "kind"]),
        (Data, ["typed", "many", "by_name"]),
        (Model, ["n", "inner"]),
        (dict, None),
        (tuple, None),
        (Named(1), None),
        ("Named", None),
    ],
)
def test_classes_with_fields_have_names(given: Any, names: list[str] | None) -> None:
    assert field_names(given) == names


def test_one_level_of_an_object_is_its_fields_as_they_are() -> None:
    inner = Named(2, "a")
    assert shallow(Model(n=1, inner=inner)) == {"n": 1, "inner": inner}
    row = {"n": inner}
    assert shallow(row) is row
    for other in (inner, (1, 2), [1], 5, None):
        assert shallow(other) is None


def test_objects_of_such_classes_become_dicts_at_any_depth() -> None:
    made = Data({"n": 1}, (Named(2, "a"),), {"x": 1.5})
    assert as_dicts(made) == {"typed": {"n": 1}, "many": [{"n": 2, "kind": "a"}], "by_name": {"x": 1.5}}
    assert as_dicts([1, ("x", None)]) == [1, ["x", None]]
    assert as_dicts(Model(n=1, inner=Named(2))) == {"n": 1, "inner": {"n": 2, "kind": None}}
