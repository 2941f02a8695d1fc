"""Side outputs of steps: their names, and the records for which a function raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from minishuffle.errors import UsageError
from minishuffle.operators.event_time import EventTime
from minishuffle.plan.arguments import checked_name
from minishuffle.plan.knownrows import ErrorRows
from minishuffle.plan.nodes import Known, ObjectSchema

__all__ = ["SIDE_STEPS", "checked_sides", "error_records", "late_records"]

SIDE_STEPS: Final = {
    "late": "a window or join with late='side'",
    "late_right": "a join with late='side'",
    "panes": "a window with allowed_lateness or early",
    "errors": "map, map_async, filter, flat_map, process or to_table with on_error='side'",
}
"""What gives the side outputs that are not the user's own."""


def checked_sides(names: Sequence[str]) -> tuple[str, ...]:
    """The names of side outputs of the user's own.

    Raises:
        UsageError: there is something else than names, or one that is taken.
    """
    if isinstance(names, str):
        raise UsageError(f"sides takes a list of names: write [{names!r}]")
    checked = tuple(dict.fromkeys(checked_name(name, "sides") for name in names))
    if taken := sorted(SIDE_STEPS.keys() & set(checked)):
        raise UsageError(f"{taken[0]!r} is not a name for a side output of your own: choose another one")
    return checked


def error_records(given: Known, time: EventTime | None) -> Known:
    """The side output of records with which something is wrong, with their times if they are beside them."""
    schema = ObjectSchema(origins=(ErrorRows(given.origins),))
    return Known(schema, time if time is not None and time.is_beside else None)


def late_records(policy: str, **given: Known) -> Mapping[str, Known]:
    """The side outputs of late records, by their names, if these go there."""
    return given if policy == "side" else {}
