"""Why pyarrow refuses an expression, in the words of the methods that users have written.

It names kernels: ``Function 'utf8_upper' has no kernel matching input types (int64)`` for
``col("n").str.upper()``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["refusal_text"]

_NO_KERNEL: Final = re.compile(r"Function '(\w+)' has no kernel matching input types \((.+)\)")
_NO_DATE: Final = re.compile(r"Unsupported cast from (.+) to (date)32 using function")
_OPERATORS: Final = re.compile(r"(?:equal|not_equal|less|greater|add|subtract|multiply|divide)\w*")
_BETWEEN_TYPES: Final = re.compile(r", (?![^<(\[]*[>)\]])")
_METHODS: Final = {
    "utf8_lower": ".str.lower",
    "utf8_upper": ".str.upper",
    "utf8_length": ".str.len",
    "match_substring": ".str.contains",
    "match_substring_regex": ".str.matches",
    "starts_with": ".str.starts_with",
    "ends_with": ".str.ends_with",
    "utf8_trim_whitespace": ".str.strip",
    "utf8_trim": ".str.strip",
    "replace_substring": ".str.replace",
    "utf8_slice_codeunits": ".str.slice",
    "utf8_split_whitespace": ".str.split",
    "split_pattern": ".str.split",
    "binary_join_element_wise": ".str.join",
    "year": ".dt.year",
    "month": ".dt.month",
    "day": ".dt.day",
    "hour": ".dt.hour",
    "minute": ".dt.minute",
    "second": ".dt.second",
    "day_of_week": ".dt.weekday",
    "date": ".dt.date",
    "floor_temporal": ".dt.truncate",
    "strftime": ".dt.format",
}
"""By function of pyarrow, the method that calls it; ``date`` is a cast."""
_CLOCK: Final = frozenset({"hour", "minute", "second"})
"""What a date has not."""
_JOIN: Final = "binary_join_element_wise"
_TEXTS: Final = ("string", "large_string")
_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NESTED: Final = ("list", "large_list", "fixed_size_list", "struct", "map")


def refusal_text(expressions: Sequence[pc.Expression], error: Exception) -> str:
    """The error, with the column, its type, the method and the cast that helps if a method of ``.str`` or
    ``.dt`` does not take the type; else in pyarrow's words behind the expressions."""
    shown, said = "; ".join(map(str, expressions)), str(error)
    found = _NO_KERNEL.search(said)
    function, types = (found[1], found[2]) if found else ("", "")
    if no_date := _NO_DATE.search(said):
        function, types = no_date[2], no_date[1]
    if function in _METHODS and isinstance(error, pa.ArrowNotImplementedError):
        return _method_text(function, types, shown)
    advice = _cast_advice(types) if _OPERATORS.fullmatch(function) else ""
    return f"{shown:.200}: {said:.400}{advice}"


def _method_text(function: str, types: str, shown: str) -> str:
    method = _METHODS[function]
    call, number = "cast" if function == "date" else function, 0
    if function == _JOIN:  # It takes several, the last of which is the separator.
        kinds = _BETWEEN_TYPES.split(types)
        number = next((n for n, kind in enumerate(kinds) if kind != "string"), 0)  # Of long ones too.
        types = kinds[number]
    found = re.findall(rf"\b{call}\((?:([^(){{}}]+)[,)])?", shown)  # Empty where the column is computed.
    names = found[0].split(", ") if len({*found}) == 1 and found[0] else []
    column = f"col({names[number]!r})" if number < len(names) else ""
    taken = "texts" if method.startswith(".str") else "times" if function in _CLOCK else "times and dates"
    what = f"{column} is {types}" if column else f"this is {types}: {shown:.200}"
    cast, when = _cast(types, taken)
    way = f": write {column}{cast}{'' if function == _JOIN else f'{method}(...)'}{when}" if cast else ""
    return f"{method}() takes {taken}, and {what}{way}"


def _cast(kind: str, taken: str) -> tuple[str, str]:
    """What makes texts or times of the type, and of which values; empty if nothing does."""
    if taken == "texts":
        return ("" if kind.partition("<")[0] in _NESTED else ".cast('string')"), ""
    if kind in _TEXTS:
        return ".cast('timestamp[us]')", " for texts such as 2026-01-31 12:00:00"
    if kind in _INTEGERS:
        first = "" if kind == "int64" else ".cast('int64')"
        return f"{first}.cast('timestamp[s]')", " if it counts seconds since 1970, with [ms] for thousandths"
    return "", ""


def _cast_advice(types: str) -> str:
    """What to write if pyarrow compares or computes with two types that do not go together."""
    middle = len(types) // 2 - 1
    if types[:middle] == types[middle + 2 :]:
        return ""  # twice the same
    return ": cast one of them to the type of the other, as in col('x').cast('int64')"
