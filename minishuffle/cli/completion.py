"""``minishuffle completion``: the script by which a shell completes what is typed, and what may come next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete

from minishuffle.cli.session import session_of
from minishuffle.cli.terminal import echo
from minishuffle.client import Client
from minishuffle.errors import ShuffleError
from minishuffle.examples import BUILT_IN
from minishuffle.plan.graph import JobSettings

__all__ = ["complete_job", "complete_set", "complete_spec", "complete_task", "complete_worker", "completion"]

Items: TypeAlias = list[CompletionItem[str]]
Answer = TypeVar("Answer")
SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
PROGRAM = "minishuffle"
VARIABLE = "_MINISHUFFLE_COMPLETE"
"""By which click finds that a shell asks it for what may come next."""
ANSWER_SECONDS_MAX = 0.25
"""For the connection to a coordinator, and again for its answer: whoever pressed Tab waits for both."""
BASH = """\
_minishuffle_typed() {
    _minishuffle_completion "$@"
    if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o nosort -o default -F _minishuffle_typed minishuffle"""
"""File names where nothing else fits, and no blank behind ``key=``."""


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that has a shell complete commands, options and their values.

    \b
    bash: add to ~/.bashrc    eval "$(minishuffle completion bash)"
    zsh:  add to ~/.zshrc     eval "$(minishuffle completion zsh)"
    fish: run once            minishuffle completion fish > ~/.config/fish/completions/minishuffle.fish

    Built-in jobs, their --set keys and the codes of errors are completed, too, and of a cluster that runs its
    jobs, tasks and workers; where a job is to be named that is not built in, files.
    """
    echo(SHELLS[shell](context.find_root().command, {}, PROGRAM, VARIABLE).source())
    if shell == "bash":
        echo(BASH)


# --- what may come next ---------------------------------------------------------------------------
#
# click calls these with what is typed so far. A shell has no place for an error: there is nothing then.


def complete_spec(context: click.Context, parameter: click.Parameter, typed: str) -> Items:
    """A job to submit: one that is built in, else a file."""
    # In this order: what has bash look for files makes it forget the words before.
    return [CompletionItem(typed, type="file"), *_items(typed, sorted(BUILT_IN))]


def complete_set(context: click.Context, parameter: click.Parameter, typed: str) -> Items:
    """``key=`` of a built-in job, and of every job; the user's own code is not run for it."""
    job = _job(context)
    keys = sorted(JobSettings.model_fields) if context.info_name == "submit" else []
    if job in BUILT_IN:
        from minishuffle.cli.loading import load_job  # It needs numpy and pyarrow, and the others do not.

        keys = [each.name for each in load_job(job).parameters] + keys
    return _items(typed, (f"{key}=" for key in keys))


def complete_job(context: click.Context, parameter: click.Parameter, typed: str) -> Items:
    """The id of a job that the cluster has."""
    found = _asked(context, lambda client: client.jobs(tasks=False))
    jobs = (CompletionItem(each.job, help=f"{each.name}, {each.state}") for each in found)
    return [job for job in jobs if job.value.startswith(typed)]


def complete_task(context: click.Context, parameter: click.Parameter, typed: str) -> Items:
    """``NAME[i]`` of a subtask of the job that is typed before it, else of the only one that runs."""
    session, job = session_of(context), _job(context)
    tasks = _asked(context, lambda client: client.job(job or session.only_job(client)).tasks)
    # The first operator of a chain names it too; a shell would take the arrow for a redirection.
    return _items(typed, (f"{task.name.partition(' ')[0]}[{task.index}]" for task in tasks))


def complete_worker(context: click.Context, parameter: click.Parameter, typed: str) -> Items:
    """The number of a worker that is alive."""
    workers = _asked(context, lambda client: client.workers())
    return _items(typed, (str(each.worker) for each in workers if each.state == "alive"))


def _items(typed: str, words: Iterable[str]) -> Items:
    return [CompletionItem(word) for word in words if word.startswith(typed)]


def _job(context: click.Context) -> str:
    """The argument JOB; where an option still lacks its value, click has not named the arguments yet."""
    return str(context.params.get("job") or next(iter(context.args), ""))


def _asked(context: click.Context, ask: Callable[[Client], list[Answer]]) -> list[Answer]:
    """What the cluster answers that the options typed so far name; nothing if there is none."""
    try:
        with session_of(context).client(timeout=ANSWER_SECONDS_MAX) as client:
            return ask(client)
    except (ShuffleError, OSError):
        return []
