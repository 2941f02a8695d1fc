"""``minishuffle drill``: failures on purpose, and whether the job takes them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import click

from minishuffle.cli.session import (
    FiniteRange,
    guarantee_option,
    json_option,
    late_global_options,
    print_json,
    session_of,
)
from minishuffle.cli.terminal import echo
from minishuffle.cli.worker import signal_worker
from minishuffle.console import console, new_table
from minishuffle.errors import UsageError

__all__ = ["drill"]

KINDS: Final = ("task", "process", "host", "stop", "link")


@click.command()
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="A function raises; a worker is killed; its host has no network (hosts are network namespaces: as "
    "root); a worker is stopped until it is declared lost; the data connection of two workers breaks. "
    "Default: all of them in turn.",
)
@click.option("--job", help="A job that runs already, on --cluster; its workers are on this machine.")
@click.option("--times", default=5, show_default=True, type=click.IntRange(1, 10_000))
@click.option(
    "--every",
    default=2.0,
    show_default=True,
    type=FiniteRange(0.1, 3600),
    help="Seconds, at least, between a recovery and the next failure.",
)
@click.option("--seed", default=0, show_default=True, help="Decides whom the failures strike.")
@guarantee_option
@json_option
@late_global_options
@click.pass_context
def drill(
    context: click.Context,
    kind: Any,
    job: str | None,
    *,
    times: int,
    every: float,
    seed: int,
    guarantee: Any,
    as_json: bool,
) -> None:
    """Cause failures in a running job, one after the other, and check what has to hold after each.

    Starts a cluster and a job of its own. After each failure all tasks run, no attempt of another task was
    replaced, no other output was silent for 250 ms longer than without a failure, and the books balance.
    Exits with 1 if a check fails, and says which. With --guarantee at_least_once the job has two sources, a
    join, windows and files on every worker, and no row may be missing.

    With --job the failures strike that job: workers are killed and stopped, and their connections cut. It has
    no log of what should have come out: no total may fall instead.
    """
    progress = partial(echo, err=True)
    if job is None:
        from minishuffle.bench.drill import run_drill

        kinds = _in_turn([kind] if kind else _kinds_here(), times)
        found = run_drill(kinds, every=every, seed=seed, guarantee=guarantee, progress=progress)
    elif guarantee != "loss":
        raise UsageError("--guarantee is for a job of the drill's own: leave out --job, or --guarantee")
    else:
        from minishuffle.bench.running import RUNNING_KINDS, drill_running

        kinds = _in_turn([kind] if kind else RUNNING_KINDS, times)
        with session_of(context).client() as client:
            found = drill_running(
                client, job, kinds, signal_worker, every=every, seed=seed, progress=progress
            )
    if as_json:
        print_json(found)
    else:
        _show(found)
    context.exit(1 if found["failed_checks"] else 0)


def _in_turn(kinds: Iterable[Any], times: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(kinds), times))


def _kinds_here() -> list[str]:
    """All that this user can bring about."""
    if os.geteuid() == 0:
        return list(KINDS)
    echo("without failures of hosts, which are network namespaces that only root can make", err=True)
    return [kind for kind in KINDS if kind != "host"]


def _show(found: dict[str, Any]) -> None:
    table = new_table(("what", "p50", "max"), right=("p50", "max"))
    for name, text in (
        ("outage_ms", "output of what failed is missing"),
        ("others_gap_ms", "longest silence of another subtask"),
        ("others_gap_baseline_ms", "the same without a failure"),
        ("machine_stalls_ms", "times at which the machine stood still, left out of both"),
    ):
        if times := found[name]:
            table.add_row(text, f"{times['p50']} ms", f"{times['max']} ms")
    console().print(table)
    for name in ("others_restarted", "dropped", "in_flight", "missing", "duplicated", "disordered"):
        if name in found:
            echo(f"{name.replace('_', ' ')}: {found[name]:,}")
    for problem in found["failed_checks"]:
        echo(f"FAILED {problem}")
    echo(f"{found['kind']}, seed {found['seed']}: {found['recovered']} of {found['times']} recovered")
