"""What users say in ``option(...)``, checked: Spark takes any key and any text."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from typing import Final, TypeVar

from minishuffle.errors import UnknownName, UsageError

__all__ = ["OWN", "check_names", "number"]

OWN: Final = (
    "stream",
    "job",
    "sink",
    "coordinator",
    "cluster",
    "state-dir",
    "secret-file",
    "partitions",
    "timeout",
    "max-rows-per-batch",
)
SPARKS: Final = frozenset({"path", "paths", "checkpointlocation", "queryname", "outputmode"})
"""Keys that Spark adds, or takes for itself from the same options."""

NUMBER_END: Final = 1 << 31
"""Above all that makes sense, and what the wire and Spark carry."""

Number = TypeVar("Number", int, float)


def check_names(options: Mapping[str, str]) -> None:
    """Raises UnknownName: an option has a name that nobody knows, and would count for nothing."""
    for name in options:
        if name.lower() in SPARKS or name.lower() in OWN:
            continue
        near = difflib.get_close_matches(name.lower(), OWN, 1)
        mend = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownName(f"there is no option {name!r}; {mend}there are {', '.join(OWN)}")


def number(options: Mapping[str, str], name: str, default: Number, least: int) -> Number:
    """The number that an option says, of the type of its default.

    Raises:
        UsageError: it says none, or one that is out of range.
    """
    text = options.get(name)
    if text is None:
        return default
    with contextlib.suppress(ValueError):
        found = type(default)(text)
        if least <= found < NUMBER_END:  # False for what is not a number, "nan".
            return found
    what = "whole number" if isinstance(default, int) else "number"
    raise UsageError(f"option {name!r} takes a {what} from {least}, not {text!r:.80}")
