"""Records that a job left out of its results: dropped, late or skipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from minishuffle.errors import counted
from minishuffle.wire.requests import JobInfo

__all__ = ["left_out", "left_out_texts"]

_TEXTS: Final = {
    "late": "came too late and {were} dropped: raise out_of_order= of event_time(), or write late='side'",
    "skipped": "{were} skipped, since a function raised, or what was read makes no record (on_error='skip')",
    "dead_letters": "{are} (on_error='dead_letter'): see 'minishuffle jobs logs {job}'",
    "never_made": "fell due at a source with a rate while it did not run, and {were} never made",
    "dropped": "{were} dropped when a task or worker failed: see 'minishuffle jobs show {job}'",
}


def left_out(info: JobInfo) -> dict[str, int]:
    """Numbers of records left out, by reason; zeros are left out."""
    counters = [task.counters for task in info.tasks]
    counts = {
        "late": sum(each.late_dropped for each in counters),
        "skipped": sum(each.user_errors.get("skip", 0) for each in counters),
        "dead_letters": sum(each.user_errors.get("dead_letter", 0) for each in counters),
        "never_made": sum(each.rows_skipped for each in counters),
        "dropped": sum(info.rows_dropped.values()),
    }
    return {name: count for name, count in counts.items() if count}


def left_out_texts(info: JobInfo, what: Iterable[str] = tuple(_TEXTS)) -> list[str]:
    """The numbers in words, one line for each reason of ``what``; without losses that are reported for every
    job that lost rows."""
    found = left_out(info)
    counts = {name: found[name] for name in what if name in found}
    if info.state == "finished_with_loss":
        counts.pop("dropped", None)
    return [f"{counted(count, 'record')} {_text(name, count, info.job)}" for name, count in counts.items()]


def _text(name: str, count: int, job: str) -> str:
    were, are = ("was", "is a dead letter") if count == 1 else ("were", "are dead letters")
    return _TEXTS[name].format(were=were, are=are, job=job)
