"""The releases of packages that a job's functions depend on, in each process involved.

Functions and operators are pickled where the job is submitted, and unpickled in workers, so both sides need
the packages that the pickles refer to. Python's own major.minor is compared when processes register and jobs
are submitted; this module compares the packages.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Final

from minishuffle.errors import UsageError

__all__ = ["compared_releases", "releases_here", "require_same_release"]

HERE: Final = "this program"
NAMED_MAX: Final = 3
"""Most workers named that have the same versions."""
PARTS_THAT_MATTER: Final = {"minishuffle": 2, "cloudpickle": 1, "numpy": 1, "pyarrow": 0}
"""By package, how many parts of its version have to be equal for one side to open what the other has
pickled: a minor of minishuffle may change its operators, a major of numpy has moved its modules. Columns
cross processes in Arrow's format, which all releases of it read."""


@cache
def releases_here() -> dict[str, str]:
    """The version of each package, and of Python, in this process."""
    return {"python": platform.python_version()} | {
        package: metadata.version(package) for package in PARTS_THAT_MATTER
    }


def _is_apart(package: str, one: str, other: str) -> bool:
    count = PARTS_THAT_MATTER.get(package, 0)
    return one.split(".")[:count] != other.split(".")[:count]


def require_same_release(worker: Mapping[str, str], coordinator: str) -> None:
    """Raises UsageError: a worker is of a release of minishuffle that cannot work with the coordinator's."""
    theirs = worker.get("minishuffle", coordinator)
    if _is_apart("minishuffle", theirs, coordinator):
        raise UsageError(
            f"the worker runs minishuffle {theirs}, this cluster {coordinator}: start it with that release"
        )


def _names_of(workers: Sequence[int]) -> str:
    names = ", ".join(map(str, workers[:NAMED_MAX]))
    more = f" and {len(workers) - NAMED_MAX:,} more" if len(workers) > NAMED_MAX else ""
    return f"worker{'s' if len(workers) > 1 else ''} {names}{more}"


def compared_releases(client: Mapping[str, str], workers: Mapping[int, Mapping[str, str]]) -> str:
    """A table of what a client and the workers that might run its job have in different versions; empty if
    they have the same. What one of them does not say is not compared.

    Raises:
        UsageError: what the client has pickled cannot be opened with the versions of some worker; with the
            table.
    """
    found = {
        package: {each.get(package, here) for each in workers.values()} for package, here in client.items()
    }
    different = [package for package, here in client.items() if found[package] - {here}]
    if not different:
        return ""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number in sorted(workers):
        groups.setdefault(tuple(workers[number].get(each, "?") for each in different), []).append(number)
    rows = [["", *different], [HERE, *(client[package] for package in different)]]
    rows += [[_names_of(numbers), *versions] for versions, numbers in groups.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    apart = [
        package
        for package in different
        if any(_is_apart(package, client[package], there) for there in found[package])
    ]
    if apart:
        raise UsageError(
            f"workers cannot run what this program submits: {' and '.join(apart)} must be of the same "
            f"release there and here\n{table}"
        )
    return f"workers have other versions than this program of what its functions may use\n{table}"
