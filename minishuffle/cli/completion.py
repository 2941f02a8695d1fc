"""``minishuffle completion``: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from minishuffle.cli.terminal import echo

__all__ = ["completion"]

SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
PROGRAM = "minishuffle"
VARIABLE = "_MINISHUFFLE_COMPLETE"
"""By which click finds that a shell asks it for what may come next."""


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that has a shell complete commands, options and their values.

    \b
    bash: add to ~/.bashrc    eval "$(minishuffle completion bash)"
    zsh:  add to ~/.zshrc     eval "$(minishuffle completion zsh)"
    fish: run once            minishuffle completion fish > ~/.config/fish/completions/minishuffle.fish
    """
    echo(SHELLS[shell](context.find_root().command, {}, PROGRAM, VARIABLE).source())
