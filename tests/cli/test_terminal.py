"""Output where the terminal lacks characters, or takes none."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from minishuffle.cli import tables
from minishuffle.cli.main import cli
from minishuffle.cli.terminal import echo
from minishuffle.cli.top import _Span, _table
from minishuffle.console import console
from minishuffle.counters import TaskCounters
from minishuffle.observe.diagnosis import Judged
from minishuffle.observe.loads import vertex_loads
from minishuffle.wire.requests import ClusterStatus, JobInfo, TaskInfo

ENCODINGS = {"ascii": b"j\\xf6b\\u4e16", "cp1252": b"j\xf6b\\u4e16", "utf-8": "jöb世".encode()}
"""And how the name below stands there."""
NAME = "jöb世"
JOB = JobInfo(
    job="j1",
    name=NAME,
    state="running",
    submitted_at=1.0,
    ended_at=3.5,
    tasks=[
        TaskInfo(
            operator=0, name=NAME, index=0, attempt=1, state="running", worker=1, counters=TaskCounters()
        )
    ],
    causes=[],
)
JUDGED = Judged(vertex_loads(JOB, JOB), None)
STATUS = ClusterStatus(
    cluster=NAME, version="0.2.0", term=1, pid=41, web_port=8472, workers=[], jobs=[JOB], journal_problem=NAME
)
VIEWS: dict[str, Callable[[], None]] = {
    "jobs list": lambda: tables.show_jobs([JOB]),
    "jobs show": lambda: tables.show_job(JOB),
    "cluster status": lambda: tables.show_status(STATUS),
    "top": lambda: console().print(
        _table(_Span([(JOB, Judged(vertex_loads(JOB, JOB), None))], None, [], []))
    ),
    "a line": lambda: echo(f"{NAME}  running"),
}


def written(monkeypatch: pytest.MonkeyPatch, encoding: str, show: Callable[[], None]) -> bytes:
    binary = io.BytesIO()
    # As the standard output is by default: what the encoding lacks raises.
    with io.TextIOWrapper(binary, encoding=encoding) as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        show()
        stream.flush()
        return binary.getvalue()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("view", VIEWS)
def test_what_the_terminal_lacks_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, view: str
) -> None:
    found = written(monkeypatch, encoding, VIEWS[view])
    assert ENCODINGS[encoding] in found
    assert NAME in found.decode(encoding).encode("latin-1", "backslashreplace").decode("unicode_escape")


def test_columns_stay_columns_beside_what_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    header, row = written(monkeypatch, "ascii", VIEWS["jobs list"]).decode().splitlines()
    assert header.index("state") == row.index("running")


def test_errors_are_escaped_too() -> None:
    result = CliRunner(charset="ascii").invoke(cli, ["sübmit"], prog_name="minishuffle")
    assert result.exit_code == 2
    assert "there is no command 's\\xfcbmit'" in result.stderr


def test_the_help_of_every_command_is_ascii() -> None:
    """By itself click writes UTF-8 where the encoding is ASCII."""

    def check(command: click.Command, path: list[str]) -> None:
        assert command.get_help(click.Context(command, info_name=path[-1])).isascii(), path
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                under = command.get_command(context, name)
                assert under is not None
                check(under, [*path, name])

    check(cli, ["minishuffle"])


PROGRAM = """
from minishuffle import Stream
print("grüße")
job = Stream.items([1]).map(abs).name("mäp").collect()
"""


def minishuffle(
    *arguments: str, stdout: int | None = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "minishuffle", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=60,
    )


@pytest.mark.slow
def test_what_the_users_own_file_prints_is_escaped_too(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(PROGRAM, encoding="utf-8")
    done = minishuffle("submit", f"{path}:job", "--describe", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xfc\\xdfe" in done.stdout and b"items -> m\\xe4p -> collect" in done.stdout


@pytest.mark.parametrize(("arguments", "unbuffered"), [([], "1"), (["submit", "keyby", "--describe"], "")])
def test_a_full_standard_output_is_named(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = minishuffle(*arguments, stdout=full.fileno(), PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr.decode()) == (
        1,
        "minishuffle: cannot write the standard output: No space left on device; send it elsewhere\n",
    )
