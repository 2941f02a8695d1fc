"""The command group, and how an error looks: one clear line, no traceback unless ``--debug``."""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from minishuffle.cli.session import Session, global_options, session_of
from minishuffle.cli.terminal import STDOUT, drop_stdout, echo, own_stdout, with_number
from minishuffle.errors import ShuffleError, UsageError, described, text_of

__all__ = ["CommandLine", "cli", "main"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_COMMANDS = {
    "demo": "minishuffle.cli.demo:demo",
    "cluster": "minishuffle.cli.cluster:cluster",
    "worker": "minishuffle.cli.worker:worker",
    "coordinator": "minishuffle.cli.worker:coordinator",
    "submit": "minishuffle.cli.jobs:submit",
    "jobs": "minishuffle.cli.jobs:jobs",
    "state": "minishuffle.cli.statefolders:saved_state",
    "top": "minishuffle.cli.top:top",
    "diagnose": "minishuffle.cli.diagnose:diagnose",
    "dump": "minishuffle.cli.dump:dump",
    "trace": "minishuffle.cli.trace:trace",
    "tap": "minishuffle.cli.taprows:tap",
    "profile": "minishuffle.cli.profile:profile",
    "schema": "minishuffle.cli.schema:schema",
    "pipeline": "minishuffle.cli.pipeline:pipeline",
    "bench": "minishuffle.cli.bench:bench",
    "drill": "minishuffle.cli.drill:drill",
    "doctor": "minishuffle.cli.doctor:doctor",
    "explain": "minishuffle.cli.explanations:explain",
    "completion": "minishuffle.cli.completion:completion",
    "new": "minishuffle.cli.new:new",
}


_GROUPS = {
    "Set up": ("doctor", "new", "completion"),
    "Start a cluster": ("demo", "cluster", "worker", "coordinator"),
    "Run jobs on it": ("submit", "schema", "pipeline"),
    "Watch them": ("top", "diagnose", "profile", "dump", "trace", "tap", "jobs", "state", "explain"),
    "Measure, and cause failures": ("bench", "drill"),
}
"""The commands by what a user wants, for the help."""
assert sorted(_COMMANDS) == sorted(name for names in _GROUPS.values() for name in names)


SENTENCE_MAX = 1000
"""Characters of a command's first sentence: none is cut."""


class Terminated(BaseException):
    """SIGTERM came: unwinds like Ctrl-C, so that whatever was started is stopped."""


class CommandLine(click.Group):
    """A group that loads a command when it is used, and reports errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each group with a heading of its own."""
        for title, names in _GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, command.get_short_help_str(SENTENCE_MAX))
                        for name, command in found
                        if command is not None
                    ]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _COMMANDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_COMMANDS)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]  # It always exits, so it has no standalone mode.
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run and exit; never returns."""
        session = Session()
        try:
            code = super().main(args, prog_name, standalone_mode=False, obj=session, **extra)
            if sys.stdout is not None:  # None when whoever started this closed it.
                sys.stdout.flush()
        except Exception as error:
            if session.debug:
                traceback.print_exc()
            code = _report(error)
        except KeyboardInterrupt:
            echo("minishuffle: interrupted", err=True)
            code = EXIT_INTERRUPTED
        except Terminated:
            code = EXIT_TERMINATED
        sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception) -> int:
    """Print what went wrong; gives the exit code."""
    if isinstance(error, click.exceptions.Abort):
        echo("minishuffle: interrupted", err=True)
        return EXIT_INTERRUPTED
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        try:
            echo(error.format_message())
        except OSError as unwritten:
            return _report(unwritten)
        return EXIT_USAGE
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        echo(f"minishuffle: {error.format_message()}{hint}", err=True)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        drop_stdout()
        return EXIT_FAILURE
    if isinstance(error, OSError) and error.filename == STDOUT:
        drop_stdout()
        echo(f"minishuffle: cannot write the standard output: {error.strerror}; send it elsewhere", err=True)
        return EXIT_FAILURE
    if isinstance(error, OSError):
        fix = _FIXES.get(error.errno or 0, "")
        echo(f"minishuffle: {text_of(error) or type(error).__name__}{fix}", err=True)
        return EXIT_FAILURE
    if isinstance(error, ShuffleError):
        echo(f"minishuffle: {with_number(str(error), error)}", err=True)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE
    echo(f"minishuffle: unexpected {described(error)}; --debug shows where", err=True)
    return EXIT_FAILURE


_PLACE = "or name another place with --state-dir"
_FIXES = {
    errno.EACCES: f"; see to its permissions, {_PLACE}",
    errno.EPERM: f"; see to its permissions, {_PLACE}",
    errno.EROFS: f"; make it writable, {_PLACE}",
    errno.ENOSPC: f"; make room on that disk, {_PLACE}",
    errno.EDQUOT: f"; make room within your quota, {_PLACE}",
    errno.EMFILE: "; raise the limit of open files, e.g. ulimit -n 4096",
}
"""By what the operating system refuses."""


@click.group(
    cls=CommandLine,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="The global options may stand before or after the command.",
)
@global_options
@click.version_option(package_name="minishuffle", prog_name="minishuffle")
@click.pass_context
def cli(context: click.Context) -> None:
    """A streaming shuffle runtime: keyed data between worker processes, with credit-based flow control."""
    session = session_of(context)
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    logging.basicConfig(
        level=levels[min(session.verbose, 2)],
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def main() -> NoReturn:
    """Run the command line; what starts it is ``minishuffle.cli.entry``."""
    signal.signal(signal.SIGTERM, _terminate)
    if sys.stdout is not None:
        sys.stdout = own_stdout(sys.stdout)
    cli.main()


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated
