"""The columns of joins of tables: their names and types, what is held of them, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import UsageError, WrongColumns
from minishuffle.exchange.schemas import with_innermost, without_dictionary, without_view
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.join_inputs import LEFT, RIGHT, How
from minishuffle.operators.key_kinds import check_key_kinds
from minishuffle.operators.wider_type import as_type, in_schema

__all__ = [
    "JoinColumns",
    "SUFFIX",
    "joined_names",
    "plain",
    "plain_schema",
    "with_columns",
]

SUFFIX = "_right"


def joined_names(left: Sequence[str], right: Sequence[str], suffix: str = SUFFIX) -> list[str]:
    """The left's names and the right's, which get ``suffix`` where the left has them, and so often that no
    two are the same.

    Raises:
        UsageError: one side has two of one name.
    """
    if len(set(left)) < len(left) or len(set(right)) < len(right):
        raise UsageError(f"a join of two columns of one name: rename some of {', '.join([*left, *right])}")
    taken = {*left, *(name for name in right if name not in left)}
    names = list(left)
    for name in right:
        if name in left:
            name += suffix
            while name in taken:
                name += suffix
            taken.add(name)
        names.append(name)
    return names


def with_columns(schema: pa.Schema, names: frozenset[str] | None) -> pa.Schema:
    """The fields of those names (None: all) of a schema."""
    if names is None:
        return schema
    return pa.schema([field for field in schema if field.name in names])


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema without metadata, dictionary encoding, and views, which pyarrow cannot take rows from."""
    return pa.schema(
        [
            field.with_type(
                with_innermost(with_innermost(field.type, without_dictionary), without_view)
            ).remove_metadata()
            for field in schema
        ]
    )


def plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch without dictionaries and views, its columns as in ``schema``."""
    found: pa.RecordBatch = in_schema(batch, schema, "the join")
    return found


class JoinColumns:
    """The columns of an interval join: the keys, the left's others, the right's others.

    What is held of a side is its batch in that order: of the left keys and others, of the right others, and
    the keys too if rows of the right may go out alone, or if there are no others. Semi and anti joins give
    the left's columns, and hold the right's keys. A name of the right that the left has too gets ``suffix``.
    Event times are held apart.
    """

    method = "join"

    def __init__(
        self,
        left_keys: tuple[str, ...],
        right_keys: tuple[str, ...],
        how: How,
        suffix: str = SUFFIX,
    ) -> None:
        self.keys = (left_keys, right_keys)
        self.how = how
        self._suffix = suffix
        self.shows_left_alone = how in ("semi", "anti")
        self._fixed: dict[str, str] | None = None
        """By column of the right that is no key, its name in the result; None before :meth:`fix`."""

    def held_names(self, given: Sequence[str], input: int) -> list[str]:
        """The columns that are held of a batch that has the columns ``given``."""
        keys = self.keys[input]
        others = self.others(given, input)
        if input == LEFT:
            return [*keys, *others]
        if self.shows_left_alone:
            return list(keys)
        return [*others, *keys] if self.how in ("full", "right") or not others else others

    def others(self, given: Sequence[str], input: int = RIGHT) -> list[str]:
        """Those that are no keys, as far as they come into the result."""
        if input == RIGHT and self.shows_left_alone:
            return []
        return [name for name in given if name not in self.keys[input]]

    def left_schema(self, schema: pa.Schema) -> pa.Schema:
        """The left's columns as they come into the result."""
        return plain_schema(schema)

    def check_keys(self, left: pa.Schema, right: pa.Schema) -> None:
        """Raises WrongColumns if no key of one side is ever equal to one of the other, or the left's is whole
        and has to stand for one of the right that may be a fraction."""
        own, others = (
            [schema.field(key) for key in keys] for schema, keys in zip((left, right), self.keys, strict=True)
        )
        check_key_kinds(self.method, own, others)
        for one, other in zip(own, others, strict=True) if self.how in ("full", "right") else ():
            fractions = pa.types.is_floating(other.type) or getattr(other.type, "scale", 0) > 0
            if pa.types.is_integer(one.type) and fractions:
                raise WrongColumns(
                    f"{self.method} with how={self.how!r} has the key of a right record without a partner in "
                    f"the left's column {one.name!r} of type {one.type}, and {other.name!r} is of type "
                    f"{other.type}: cast one of both first"
                )

    def names(self, left: Sequence[str], right: Sequence[str]) -> list[str]:
        """The names of the result, from those of both sides."""
        others = self.others(right)
        if self._fixed is not None:
            return [*self.held_names(left, LEFT), *map(self._fixed.__getitem__, others)]
        return joined_names(self.held_names(left, LEFT), others, self._suffix)

    def fix(
        self, left: Sequence[str], right: Sequence[str], times: Sequence[EventTime] = ()
    ) -> Callable[[frozenset[str] | None, int], frozenset[str] | None]:
        """Name the result after all columns of both sides, of which some may not come. Gives the columns
        that are read of each, by its number, for those that are wanted of the result (None: all)."""
        others = self.others(right)
        names = self.names(left, right)[-len(others) :] if others else []
        fixed = self._fixed = dict(zip(others, names, strict=True))
        needed = [set(keys) for keys in self.keys]
        for names_of, time in zip(needed, times, strict=False):
            if time.column is not None:
                names_of.add(time.column)

        def reads(wanted: frozenset[str] | None, input: int) -> frozenset[str] | None:
            if wanted is None:
                return None
            shown = {name: name for name in left} if input == LEFT else fixed
            return frozenset(needed[input] | {name for name, as_ in shown.items() if as_ in wanted})

        return reads

    def result(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """The schema of the result, from those of both sides.

        Raises:
            UsageError: two columns have one name.
        """
        names = self.names(left.names, right.names)
        left, right = self.left_schema(left), plain_schema(right)
        fields = [left.field(name) for name in self.held_names(left.names, LEFT)]
        if self.how in ("full", "right"):
            fields = [field.with_nullable(True) for field in fields]
        others = [right.field(name) for name in self.others(right.names)]
        if self.how in ("left", "full"):
            others = [field.with_nullable(True) for field in others]
        return pa.schema(
            [field.with_name(name) for field, name in zip([*fields, *others], names, strict=True)]
        )

    # --- results, from what is held of both sides -----------------------------------------------------

    def pairs(self, left: pa.RecordBatch, right: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Rows with a partner each."""
        wanted = len(schema) - left.num_columns
        return pa.RecordBatch.from_arrays([*left.columns, *right.columns[:wanted]], schema=schema)

    def left_alone(self, left: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Left rows without a partner."""
        missing = list(schema)[left.num_columns :]
        nulls = [pa.nulls(left.num_rows, field.type) for field in missing]
        return pa.RecordBatch.from_arrays([*left.columns, *nulls], schema=schema)

    def right_alone(self, right: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Right rows without a partner: of the left they have the keys."""
        others = right.num_columns - len(self.keys[1])
        arrays = []
        for number, field in enumerate(list(schema)[: len(schema) - others]):
            if number < len(self.keys[0]):
                arrays.append(_key_array(right.column(others + number), field))
            else:
                arrays.append(pa.nulls(right.num_rows, field.type))
        return pa.RecordBatch.from_arrays([*arrays, *right.columns[:others]], schema=schema)


def _are_same(keys: pa.Array, cast: pa.Array) -> bool:
    """Whether numbers are the same in another type. pyarrow's casts round them, and make 7 true."""
    if keys.type == cast.type or not any(map(_is_number, (keys.type, cast.type))):
        return True
    if pa.types.is_decimal(keys.type) != pa.types.is_decimal(cast.type):
        both = zip(keys.to_pylist(), cast.to_pylist(), strict=True)
        return all(one is None or Decimal(one) == Decimal(other) for one, other in both)
    back = as_type(cast, keys.type)
    same = pc.equal(back, keys)
    if pa.types.is_floating(keys.type):
        same = pc.or_(same, pc.and_(pc.is_nan(back), pc.is_nan(keys)))
    return bool(pc.all(pc.fill_null(same, True)).as_py())


def _is_number(kind: pa.DataType) -> bool:
    numbers = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(is_kind(kind) for is_kind in numbers)


def _key_array(keys: pa.Array, field: pa.Field) -> pa.Array:
    """Keys in the type of the left's key column, each the same key as before."""
    try:
        cast = as_type(keys, field.type)
        if not _are_same(keys, cast):
            raise pa.ArrowInvalid("it would be another key")
        return cast
    except pa.ArrowException as error:
        raise UsageError(
            f"the key of a right record does not fit the left's column {field.name!r} of type {field.type} "
            f"({error}), where it stands for a record without a partner: cast one of both keys first"
        ) from error
