"""``minishuffle profile``: in which functions a subtask spends its time, by samples of its stack."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click

from minishuffle import limits
from minishuffle.cli.completion import complete_job, complete_task
from minishuffle.cli.session import (
    FileToWrite,
    FiniteRange,
    json_option,
    late_global_options,
    print_json,
    session_of,
)
from minishuffle.cli.terminal import echo
from minishuffle.cli.top import WatchedCluster, looks
from minishuffle.client import Client
from minishuffle.errors import UsageError
from minishuffle.observe.loads import vertex_loads
from minishuffle.observe.profiles import (
    PROFILE_LATE_SECONDS_MAX,
    Called,
    ProfileQuestion,
    SubtaskProfile,
    calls,
    folded_lines,
    functions,
)
from minishuffle.observe.vertices import vertex_number
from minishuffle.wire.inquiries import TaskProfile
from minishuffle.wire.requests import JOB_LIVE, TaskInfo

__all__ = ["ChosenTask", "chosen_task", "profile", "profile_lines"]

SUBTASK: Final = re.compile(r"(.+)\[(\d{1,9})\]")
LOOK_SECONDS: Final = 0.5
FUNCTIONS_SHOWN: Final = 10
SHOWN_FROM: Final = 0.01
"""The share of all samples from which a call is shown."""
NAME_WIDTH: Final = 60
FUNCTIONS_BELOW: Final = "; functions are what a profile shows, without --task of the busiest subtask"
"""To whoever names a function as the task."""


class ChosenTask(NamedTuple):
    """The subtask that a profile is of."""

    task: TaskInfo
    why: str
    """Why this one, if it was not named."""

    @property
    def name(self) -> str:
        return f"{self.task.name}[{self.task.index}]"


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option(
    "--task",
    metavar="NAME[i]",
    shell_complete=complete_task,
    help="The subtask: a vertex by name, number or one of its operators, and the index. Without [i] the "
    "busiest of the vertex, without all of it the busiest of the job.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0.1, limits.PROFILE_SECONDS_MAX),
    default=5.0,
    show_default=True,
    help="How long samples are taken.",
)
@click.option(
    "--rate",
    type=FiniteRange(1.0, limits.PROFILE_HERTZ_MAX),
    default=50.0,
    show_default=True,
    help="Samples in a second.",
)
@click.option(
    "--folded",
    metavar="FILE",
    type=FileToWrite(),
    help="Write the stacks there, as speedscope and flamegraph.pl read them, and show no tree.",
)
@json_option
@late_global_options
@click.pass_context
def profile(
    context: click.Context,
    job: str | None,
    task: str | None,
    seconds: float,
    rate: float,
    folded: Path | None,
    as_json: bool,
) -> None:
    """Show in which functions one subtask of JOB spends its time: first those with the most of their own,
    then what calls what. Without JOB, of the one that runs.

    The worker looks at the stack of the subtask's thread, 50 times a second for 5 s. What is not Python
    (pyarrow, numpy, a compiled loop) counts for the line that calls it. Code of minishuffle that only calls
    on is left out of the tree.
    """
    session = session_of(context)
    with session.client() as client:
        job = job or session.only_job(client)
        chosen = chosen_task(client, job, task)
        if not as_json:
            echo(f"{chosen.name} of job {job}, on worker {chosen.task.worker}, for {seconds:g} s{chosen.why}")
        question = ProfileQuestion(job, chosen.task, secrets.token_hex(8), seconds=seconds, hertz=rate)
        found = _taken(client, question, seconds)
    if folded is not None:
        folded.write_text("".join(f"{line}\n" for line in folded_lines(found)), encoding="utf-8")
    if as_json:
        print_json(found.model_dump())
        return
    for line in profile_lines(found, tree=folded is None):
        echo(line)


def chosen_task(client: WatchedCluster, job: str, named: str | None) -> ChosenTask:
    """The subtask of that name, or the busiest one.

    Raises:
        UsageError: there is none of that name, or the job does not run.
    """
    info = client.job(job)
    if info.state not in JOB_LIVE:
        raise UsageError(f"job {job} is {info.state}: only one that runs has a profile")
    match = None if named is None else SUBTASK.fullmatch(named)
    vertex = named if match is None else match[1]
    operator = None if vertex is None else vertex_number(info, vertex, FUNCTIONS_BELOW)
    tasks = {(task.operator, task.index): task for task in info.tasks}
    if match is not None:
        found = tasks.get((operator or 0, int(match[2])))
        if found is None:
            most = max(index for number, index in tasks if number == operator)
            raise UsageError(f"{vertex} of job {job} has no subtask {match[2]}: it has 0 to {most}")
        return ChosenTask(found, "")
    before, after = next(looks(client, job))
    operators = sorted({number for number, _ in tasks})
    loads = [
        (load.busy, number, load.busiest)
        for number, load in zip(operators, vertex_loads(before[0], after[0]), strict=True)
        if operator in (None, number)
    ]
    busy, number, index = max(loads)
    which = "the job" if operator is None else f"vertex {vertex}"
    return ChosenTask(tasks[number, index], f": the busiest of {which}, {busy:.0%} of its time")


def _taken(client: Client, question: ProfileQuestion, seconds: float) -> SubtaskProfile:
    """Have the worker take it, and wait for its end.

    Raises:
        UsageError: the worker takes another one, or has no such subtask.
        PeerLost: the worker does not answer.
    """
    deadline = time.monotonic() + seconds + PROFILE_LATE_SECONDS_MAX
    while (found := question.read(client.ask_workers(question.message))) is None:
        if time.monotonic() > deadline:
            raise question.unanswered()
        time.sleep(min(LOOK_SECONDS, seconds))
    return found


# --- text -----------------------------------------------------------------------------------------


def profile_lines(found: TaskProfile, *, tree: bool = True) -> Iterator[str]:
    """A profile as text."""
    total = sum(found.samples.values())
    early = f", then {found.why}" if found.why else ""
    yield f"{total:,} samples in {found.seconds:.1f} s{early}: {_states(found, total)}"
    if not total:
        return
    if found.left_out:
        yield f"{found.left_out:,} samples are of stacks beyond the limit, and not below"
    yield from ("", _line("own", "all", "function", "place"))
    for each in functions(found)[:FUNCTIONS_SHOWN]:
        if each.own:
            yield _line(_share(each.own, total), _share(each.samples, total), each.function, each.place)
    if tree:
        yield from ("", _line("own", "all", "what calls what", "place"))
        for each in calls(found).called():
            yield from _tree_lines(each, total, "")


def _states(found: TaskProfile, total: int) -> str:
    shares = {state: count / max(1, total) for state, count in found.samples.items()}
    processor = found.cpu_seconds / found.seconds if found.seconds else 0.0
    return (
        f"busy {shares.get('busy', 0.0):.0%} (on a processor {processor:.0%}), waits for input "
        f"{shares.get('idle', 0.0):.0%}, for output {shares.get('backpressured', 0.0):.0%}"
    )


def _share(samples: int, total: int) -> str:
    return f"{samples / total:.1%}"


def _line(own: str, every: str, function: str, place: str) -> str:
    return f"{own:>7} {every:>7}  {function:<{NAME_WIDTH}}  {place}".rstrip()


def _tree_lines(each: Called, total: int, indent: str) -> Iterator[str]:
    """It, and what it called: code of the runtime that has no time of its own is passed over."""
    if each.samples < SHOWN_FROM * total:
        return
    passed_over = each.kind == "runtime" and each.own < SHOWN_FROM * total
    if not passed_over:
        yield _line(
            _share(each.own, total), _share(each.samples, total), f"{indent}{each.function}", each.place
        )
    for inner in each.called():
        yield from _tree_lines(inner, total, indent if passed_over else f"{indent}  ")
