"""What plain Python makes of lists of rows where a job groups, aggregates, windows or joins them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from minishuffle.exchange.keys import canonical

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[Any]
SECOND = 1_000_000


def groups(rows: Rows, key: Callable[[Row], Any]) -> dict[Any, Rows]:
    found: dict[Any, Rows] = {}
    for row in rows:
        found.setdefault(canonical(key(row)), []).append(row)
    return found


def plain_reduce(rows: Rows) -> Rows:
    return [(key, (sum(row["v"] for row in some), max(1, len(some) - 1), ()))
            for key, some in groups(rows, lambda row: row["k"]).items()]  # fmt: skip


def plain_fold(rows: Rows) -> Rows:
    return [(key, (0, 1, tuple(sorted(row["v"] for row in some))))
            for key, some in groups(rows, lambda row: row["k"]).items()]  # fmt: skip


def values(rows: Rows, name: str) -> list[Any]:
    return [row[name] for row in rows if row.get(name) is not None]


def aggregated(rows: Rows) -> Row:
    xs, vs, os = (values(rows, name) for name in "xvo")
    return {
        "n": len(xs),
        "low": min(xs, default=None),
        "high": max(vs, default=None),
        "all": sum(vs) if vs else None,
        "mid": sum(xs) / len(xs) if xs else None,
        "some": sum(os) if os else None,
        "wide": statistics.stdev(xs) if len(xs) > 1 else None,
        "kinds": len(set(vs)),
        "early": min(rows, key=lambda row: (row["t"], *by_columns(row))).get("x"),
        "late": min(rows, key=lambda row: (-row["t"], *by_columns(row))).get("v"),
    }


def by_columns(row: Row) -> tuple[Any, ...]:
    """The order of rows of one time: by the columns whose first or last is wanted, nulls before others."""
    return tuple((row.get(name) is not None, row.get(name) or 0) for name in "xv")


def plain_aggregate(rows: Rows) -> Rows:
    return [{"g": g, **aggregated(some)} for g, some in groups(rows, lambda row: row["g"]).items()]


def by_k(row: Row) -> Any:
    return row["k"]


def window_start(row: Row) -> datetime:
    return datetime.fromtimestamp(row["t"] // SECOND // 10 * 10, UTC)


def plain_windows(rows: Rows) -> Rows:
    found = groups(rows, lambda row: (row["k"], window_start(row).timestamp()))
    return [(key, window_start(some[0]), len(some)) for (key, _), some in found.items()]


def plain_window_aggregate(rows: Rows) -> Rows:
    found = groups(rows, lambda row: (row["g"], window_start(row).timestamp()))
    return [
        {"g": key, "window_start": window_start(some[0]),
         "window_end": window_start(some[0]) + timedelta(seconds=10), **aggregated(some)}
        for (key, _), some in found.items()
    ]  # fmt: skip


def plain_sliding(rows: Rows) -> Rows:
    """Windows of 10 s every 4 s."""
    spread = [
        {"k": row["k"], "t": start * SECOND}
        for row in rows
        for start in range(row["t"] // SECOND - 9, row["t"] // SECOND + 1)
        if start % 4 == 0
    ]
    found = groups(spread, lambda row: (row["k"], row["t"]))
    return [
        (key, datetime.fromtimestamp(start // SECOND, UTC), len(some)) for (key, start), some in found.items()
    ]


def plain_sessions(rows: Rows) -> Rows:
    """With gaps of 7 s, as (key, start, end, number)."""
    out = []
    for key, some in groups(rows, by_k).items():
        found: list[list[int]] = []
        for time in sorted(row["t"] for row in some):
            if found and time < found[-1][-1] + 7 * SECOND:
                found[-1].append(time)
            else:
                found.append([time])
        moments = [(times[0], times[-1] + 7 * SECOND, len(times)) for times in found]
        out += [(key, at(first), at(end), count) for first, end, count in moments]
    return out


def plain_by_number(rows: Rows) -> Rows:
    """Windows of three, as (key, start, end, number)."""
    out = []
    for key, some in groups(rows, by_k).items():
        times = sorted(row["t"] for row in some)
        firsts = range(0, len(times) - 2, 3)
        out += [(key, at(times[first]), at(times[first + 2] + 1), 3) for first in firsts]
    return out


def at(time: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time)


def has_null(key: Any) -> bool:
    return key is None or (isinstance(key, tuple) and any(map(has_null, key)))


def plain_join(how: str, before: int, after: int | None = None) -> Callable[[Rows, Rows], Rows]:
    """The right row is at most so many seconds before and after the left one."""
    ahead = before if after is None else after

    def joined(left: Rows, right: Rows) -> Rows:
        out, met = [], set()
        for row in left:
            mine = [
                (place, other) for place, other in enumerate(right)
                if not has_null(row["k"]) and canonical(other["k"]) == canonical(row["k"])
                and -before * SECOND <= other["t"] - row["t"] <= ahead * SECOND
            ]  # fmt: skip
            met.update(place for place, _ in mine)
            if how in ("semi", "anti"):
                out += [row] if bool(mine) == (how == "semi") else []
                continue
            out += [(row["k"], row, other) for _, other in mine]
            if not mine and how in ("left", "full"):
                out.append((row["k"], row, None))
        if how in ("right", "full"):
            out += [(row["k"], None, row) for place, row in enumerate(right) if place not in met]
        return out

    return joined


def looked_up(how: str) -> Callable[[Rows, Rows], Rows]:
    def joined(left: Rows, right: Rows) -> Rows:
        out = []
        for row in left:
            mine = [other for other in right if other["g"] == row["g"]]
            if not mine and how == "left":
                mine = [{}]
            out += [(row["v"], other.get("v"), row["t"], other.get("t")) for other in mine]
        return out

    return joined


def plain_as_of(rows: Rows, others: Rows) -> Rows:
    out = []
    for row in rows:
        ages = [
            row["t"] - other["t"]
            for other in others
            if not has_null(row["k"]) and canonical(other["k"]) == canonical(row["k"])
        ]
        near = [age for age in ages if 0 <= age <= 9 * SECOND]
        out.append((row["k"], row["v"], row["t"], row["t"] - min(near) if near else None))
    return out


def greatest(rows: Rows) -> Rows:
    return [{"k": key, "v": max(values(some, "v"))} for key, some in groups(rows, by_k).items()]
