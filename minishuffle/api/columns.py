"""``col``: expressions of columns with the operators of Python, and with methods for texts and times.

What it makes is a ``pyarrow.compute.Expression``, in :attr:`ColumnExpression.expression`, so that a function
that stands only there may be called: ``pc.utf8_reverse(col("word").expression)``. Operators take both where
that of ``col`` stands on the left: those of pyarrow take their own alone.

In a row where a column is null, so is what is computed of it, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias, get_args

import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import UsageError, did_you_mean
from minishuffle.plan.rowtypes import column_type, named_type

__all__ = ["ColumnExpression", "TextExpression", "TimeExpression", "TimeUnit", "col", "plain_expression"]

_OF_MANY_ROWS: Final = frozenset({"count", "first", "last", "max", "mean", "min", "std", "sum"})

TimeUnit: TypeAlias = Literal["second", "minute", "hour", "day", "week", "month", "quarter", "year"]


def col(*path: str) -> ColumnExpression:
    """A column of a table, or with further names a field of the struct in it: ``col("user", "name")``.

    ``col("price") * col("n") > 10`` is what ``pc.field("price") * pc.field("n") > 10`` is; see
    :class:`ColumnExpression` for what it has beyond that.

    Raises:
        UsageError: these are no names.
    """
    if not path or not all(isinstance(name, str) for name in path):
        shown = ", ".join(map(repr, path))
        raise UsageError(f"col takes the name of a column, such as col('price'), not ({shown:.80})")
    return ColumnExpression(pc.field(*path))


def plain_expression(given: Any) -> Any:
    """The expression of pyarrow in one of :func:`col`; anything else is itself."""
    return given.expression if isinstance(given, ColumnExpression) else given


def _operand(value: Any) -> pc.Expression:
    """An expression, of a value of Python too. Raises UsageError: Arrow has no such value."""
    value = plain_expression(value)
    try:
        return value if isinstance(value, pc.Expression) else pc.scalar(value)
    except pa.ArrowException as error:
        raise UsageError(f"{value!r:.80} is no column, and no constant that Arrow takes: {error}") from error


class ColumnExpression:
    """A column, or what is computed of some, for ``with_columns`` and ``filter``; made by :func:`col`.

    ``+ - * /``, comparisons, ``& | ~`` are those of ``pyarrow.compute``: a result that does not fit into its
    type is an error, and whole numbers divided by ``/`` give whole numbers, cut towards zero. ``//`` and
    ``%`` are those of Python.
    """

    __slots__ = ("expression",)

    def __init__(self, expression: pc.Expression) -> None:
        self.expression = expression

    def __repr__(self) -> str:
        return f"<ColumnExpression {self.expression}>"

    __hash__ = None  # type: ignore[assignment]  # As lists: two that are equal are not known to be.

    def __bool__(self) -> bool:
        raise UsageError(
            f"{self.expression!s:.200} is true for some rows and false for others: write & | ~ for and, or, "
            "not, with each comparison in parentheses, and .is_in(...) for in"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            way = "" if name.startswith("_") else _way(name)
            # With a name= Python would add the nearest one itself, behind the way.
            raise AttributeError(f"a column has no attribute {name!r}{way}", obj=self)

    # --- arithmetic ------------------------------------------------------------------------------

    def __add__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression + _operand(other))

    def __radd__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(_operand(other) + self.expression)

    def __sub__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression - _operand(other))

    def __rsub__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(_operand(other) - self.expression)

    def __mul__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression * _operand(other))

    def __rmul__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(_operand(other) * self.expression)

    def __truediv__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression / _operand(other))

    def __rtruediv__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(_operand(other) / self.expression)

    def __floordiv__(self, other: Any) -> ColumnExpression:
        """The quotient rounded down, as in Python: ``-7 // 2`` is -4. Whole numbers give whole numbers, and
        floats floats. Null if either is null; division by 0 fails the task, of floats too."""
        return _floor_quotient(self.expression, _operand(other))

    def __rfloordiv__(self, other: Any) -> ColumnExpression:
        return _floor_quotient(_operand(other), self.expression)

    def __mod__(self, other: Any) -> ColumnExpression:
        """What ``//`` leaves, with the sign of the divisor as in Python: ``-7 % 2`` is 1. Null if either is
        null; division by 0 fails the task, of floats too."""
        return _modulo(self.expression, _operand(other))

    def __rmod__(self, other: Any) -> ColumnExpression:
        return _modulo(_operand(other), self.expression)

    def __neg__(self) -> ColumnExpression:
        return ColumnExpression(pc.negate_checked(self.expression))

    def __abs__(self) -> ColumnExpression:
        return ColumnExpression(pc.abs_checked(self.expression))

    def __round__(self, digits: int = 0) -> ColumnExpression:
        """To so many digits, in the same type; halves go to the even neighbour, as in Python."""
        return ColumnExpression(pc.round(self.expression, ndigits=digits))

    # --- comparisons and conditions --------------------------------------------------------------

    def __eq__(self, other: object) -> ColumnExpression:  # type: ignore[override]
        return ColumnExpression(self.expression == _compared(other))

    def __ne__(self, other: object) -> ColumnExpression:  # type: ignore[override]
        return ColumnExpression(self.expression != _compared(other))

    def __lt__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression < _compared(other))

    def __le__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression <= _compared(other))

    def __gt__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression > _compared(other))

    def __ge__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression >= _compared(other))

    def __and__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression & _operand(other))

    def __rand__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(_operand(other) & self.expression)

    def __or__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(self.expression | _operand(other))

    def __ror__(self, other: Any) -> ColumnExpression:
        return ColumnExpression(_operand(other) | self.expression)

    def __invert__(self) -> ColumnExpression:
        return ColumnExpression(~self.expression)

    def is_in(self, values: Iterable[Any]) -> ColumnExpression:
        """Whether the value is one of these; true or false. A null is not, unless None is among them.

        Raises:
            UsageError: these are no values of one type.
        """
        try:
            if isinstance(values, str | bytes):
                raise TypeError("these are the characters of one value")
            given = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(list(values))
        except (TypeError, pa.ArrowException) as error:
            raise UsageError(
                f"is_in takes a list of values of one type, not {values!r:.80}: {error}"
            ) from error
        nothing_else = len(given) and given.null_count == len(given)  # of no type that a column has
        return self.is_null() if nothing_else else ColumnExpression(self.expression.isin(given))

    def is_null(self) -> ColumnExpression:
        """Whether there is no value. NaN is one."""
        return ColumnExpression(self.expression.is_null())

    def is_nan(self) -> ColumnExpression:
        """Whether a float is no number; null for null."""
        return ColumnExpression(self.expression.is_nan())

    def fill_null(self, value: Any) -> ColumnExpression:
        """The value, or where that is null another one: a constant, or a column."""
        return ColumnExpression(pc.coalesce(self.expression, _operand(value)))

    def if_else(self, then: Any, otherwise: Any) -> ColumnExpression:
        """``then`` where a condition is true, ``otherwise`` where it is false, null where it is null.

        Both are constants or columns: ``(col("n") > 9).if_else("many", "few")``."""
        return ColumnExpression(pc.if_else(self.expression, _operand(then), _operand(otherwise)))

    # --- types -----------------------------------------------------------------------------------

    def cast(self, kind: Any) -> ColumnExpression:
        """The value in another type: of Arrow, its name, or of Python (int, float, str, bool, bytes, date). A
        value that does not fit whole fails the task.

        Raises:
            UsageError: it is no type, or one of Python that leaves a choice.
        """
        if isinstance(kind, str):
            try:
                kind = named_type(kind)
            except ValueError:
                raise UsageError(
                    f"cast: {kind!r:.80} is no type: give one of Arrow, such as pa.int64(), or its name"
                ) from None
        if not isinstance(kind, pa.DataType):
            kind = column_type("cast", kind)
        return ColumnExpression(self.expression.cast(kind))

    @property
    def str(self) -> TextExpression:
        """What there is for texts: ``col("name").str.lower()``."""
        return TextExpression(self.expression)

    @property
    def dt(self) -> TimeExpression:
        """What there is for times and dates: ``col("at").dt.hour()``."""
        return TimeExpression(self.expression)


def _way(name: str) -> str:
    """What to write where an expression has no such method, behind a colon; nothing if that is not known."""
    if name in _OF_MANY_ROWS:
        return f": it has one value for each row: write key_by(...).aggregate(total=('amount', {name!r}))"
    if name == "alias":
        return ": write with_columns(name=...)"
    for part, kind in (("str", TextExpression), ("dt", TimeExpression)):
        if hasattr(kind, name):
            return f": write .{part}.{name}()"
    near = did_you_mean(name, [each for each in dir(ColumnExpression) if not each.startswith("_")])
    return f": {near.rstrip()}" if near else ""


def _compared(other: object) -> pc.Expression:
    if other is None:
        raise UsageError("a comparison with None is null for each row: write x.is_null() or ~x.is_null()")
    return _operand(other)


def _modulo(dividend: pc.Expression, divisor: pc.Expression) -> ColumnExpression:
    return ColumnExpression(_of_newer("modulo_checked")(dividend, divisor))


def _floor_quotient(dividend: pc.Expression, divisor: pc.Expression) -> ColumnExpression:
    """What no step of which leaves the type, or is longer than the dividend: both ``modulo`` and
    ``remainder`` leave a multiple of the divisor, and they differ by it where the quotient is cut up."""
    remainder = _of_newer("remainder")(dividend, divisor)
    cut_up = (_of_newer("modulo")(dividend, divisor) - remainder) / divisor
    # Quotients of floats may be off by a last digit; of whole numbers round() gives each as it is.
    return ColumnExpression(pc.round((dividend - remainder) / divisor - cut_up))


def _of_newer(function: str) -> Any:
    found = getattr(pc, function, None)
    if found is None:
        raise UsageError(f"% and // need a newer pyarrow than {pa.__version__}: install pyarrow>=26")
    return found


# --- texts ----------------------------------------------------------------------------------------


class TextExpression:
    """What there is for texts: ``col("name").str``. Places and lengths count characters."""

    __slots__ = ("_texts",)

    def __init__(self, texts: pc.Expression) -> None:
        self._texts = texts

    def lower(self) -> ColumnExpression:
        """In small letters."""
        return ColumnExpression(pc.utf8_lower(self._texts))

    def upper(self) -> ColumnExpression:
        """In capital letters, one for each: ẞ for ß."""
        return ColumnExpression(pc.utf8_upper(self._texts))

    def len(self) -> ColumnExpression:
        """The number of characters."""
        return ColumnExpression(pc.utf8_length(self._texts))

    def contains(self, part: str) -> ColumnExpression:
        """Whether ``part`` stands in it, letter by letter."""
        return ColumnExpression(pc.match_substring(self._texts, part))

    def matches(self, pattern: str) -> ColumnExpression:
        """Whether a regular expression (of RE2) matches a part of it."""
        return ColumnExpression(pc.match_substring_regex(self._texts, pattern))

    def starts_with(self, part: str) -> ColumnExpression:
        """Whether it begins with ``part``."""
        return ColumnExpression(pc.starts_with(self._texts, part))

    def ends_with(self, part: str) -> ColumnExpression:
        """Whether it ends with ``part``."""
        return ColumnExpression(pc.ends_with(self._texts, part))

    def strip(self, characters: str | None = None) -> ColumnExpression:
        """Without these characters, or white space, at both ends."""
        if characters is None:
            return ColumnExpression(pc.utf8_trim_whitespace(self._texts))
        return ColumnExpression(pc.utf8_trim(self._texts, characters))

    def replace(self, old: str, new: str) -> ColumnExpression:
        """With ``new`` in place of ``old``, letter by letter, wherever that stands."""
        return ColumnExpression(pc.replace_substring(self._texts, old, new))

    def slice(self, start: int, stop: int | None = None) -> ColumnExpression:
        """The characters from ``start`` up to ``stop``, as ``text[start:stop]`` of Python."""
        return ColumnExpression(pc.utf8_slice_codeunits(self._texts, start, stop))

    def split(self, separator: str | None = None) -> ColumnExpression:
        """A list of the parts between separators, or between white space: for ``explode``, say."""
        if separator is None:
            return ColumnExpression(pc.utf8_split_whitespace(self._texts))
        return ColumnExpression(pc.split_pattern(self._texts, separator))

    def join(self, *others: Any, separator: str = "") -> ColumnExpression:
        """The text and others, columns or constants, one behind the other; null if one of them is."""
        parts = [self._texts, *map(_operand, others), pc.scalar(separator)]
        return ColumnExpression(pc.binary_join_element_wise(*parts))


# --- times ----------------------------------------------------------------------------------------


class TimeExpression:
    """What there is for times and dates: ``col("at").dt``. A time with a zone is taken as a clock there shows
    it; hours and less are of times alone."""

    __slots__ = ("_times",)

    def __init__(self, times: pc.Expression) -> None:
        self._times = times

    def year(self) -> ColumnExpression:
        """The year."""
        return ColumnExpression(pc.year(self._times))

    def month(self) -> ColumnExpression:
        """The month, from 1 on."""
        return ColumnExpression(pc.month(self._times))

    def day(self) -> ColumnExpression:
        """The day of the month, from 1 on."""
        return ColumnExpression(pc.day(self._times))

    def hour(self) -> ColumnExpression:
        """The hour, 0 to 23."""
        return ColumnExpression(pc.hour(self._times))

    def minute(self) -> ColumnExpression:
        """The minute of the hour."""
        return ColumnExpression(pc.minute(self._times))

    def second(self) -> ColumnExpression:
        """The second of the minute, a whole number."""
        return ColumnExpression(pc.second(self._times))

    def weekday(self) -> ColumnExpression:
        """The day of the week: Monday is 0, as in Python."""
        return ColumnExpression(pc.day_of_week(self._times))

    def date(self) -> ColumnExpression:
        """The day, a date."""
        return ColumnExpression(self._times.cast(pa.date32()))

    def truncate(self, unit: TimeUnit) -> ColumnExpression:
        """The beginning of the second, minute, hour, day, week (from Monday), month, quarter or year, in the
        type of the column."""
        if unit not in get_args(TimeUnit):
            raise UsageError(f"truncate takes {', '.join(map(repr, get_args(TimeUnit)))}, not {unit!r:.80}")
        return ColumnExpression(pc.floor_temporal(self._times, unit=unit))

    def format(self, pattern: str) -> ColumnExpression:
        """As text: ``format("%Y-%m-%d")``, with the codes of ``strftime``; ``%S`` has the fraction too."""
        return ColumnExpression(pc.strftime(self._times, format=pattern))
