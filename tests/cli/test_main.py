import errno
import signal
import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from click.testing import Result

from minishuffle.cli import main
from minishuffle.cli.main import _report
from minishuffle.errors import PeerLost, UnknownName

Run = Callable[..., Result]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Let ``minishuffle doctor`` raise."""

    def install(error: BaseException) -> None:
        @click.command()
        def doctor() -> None:
            raise error

        monkeypatch.setattr("minishuffle.cli.doctor.doctor", doctor)

    return install


def test_help_lists_exactly_the_commands_that_work(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    listed: dict[str, list[str]] = {}
    for section in result.output.split("Options:")[1].split("\n\n")[1:]:
        title, *lines = section.strip("\n").split("\n")
        listed[title] = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    listed.popitem()  # what stands below the commands
    assert listed == {
        "Set up:": ["doctor", "new", "completion"],
        "Start a cluster:": ["demo", "cluster", "worker", "coordinator"],
        "Run jobs on it:": ["submit", "schema", "pipeline"],
        "Watch them:": ["top", "diagnose", "profile", "dump", "trace", "tap", "jobs", "state", "explain"],
        "Measure, and cause failures:": ["bench", "drill"],
    }


def test_help_gives_a_whole_sentence_for_each_command(run: Run) -> None:
    listed = run("--help").output.split("Options:")[1]
    assert "..." not in listed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sumbit"], "there is no command 'sumbit'; did you mean 'submit'?"),
        (["xyz"], "there is no command 'xyz'; there are demo, cluster,"),
        (["cluster", "upp"], "upp"),
        (["cluster", "up", "--standby", "-1"], "--standby"),
        (["jobs", "show"], "JOB"),
        (["submit", "keyby", "--parallelism", "0"], "--parallelism"),
        (["--coordinator", "nowhere", "--secret-file", __file__, "jobs", "list"], "write HOST:PORT"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(run: Run, arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("minishuffle: ")
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownName("no such thing"), 2),
        (PeerLost("it went"), 1),
        (FileNotFoundError("no file"), 1),
        (TimeoutError("too slow"), 1),
        (ZeroDivisionError("a bug"), 1),
    ],
)
def test_errors_are_one_line_without_a_traceback(
    run: Run, raising: Callable[[BaseException], None], error: Exception, code: int
) -> None:
    raising(error)
    result = run("doctor")
    assert result.exit_code == code
    assert len(result.stderr.splitlines()) == 1
    assert str(error) in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(run: Run, raising: Callable[[BaseException], None]) -> None:
    raising(PeerLost("it went"))
    result = run("--debug", "doctor")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.rstrip().endswith("minishuffle: it went (minishuffle explain MS-140)")


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (click.Abort(), 130), (main.Terminated(), 143)]
)
def test_signals_have_their_exit_codes(
    run: Run, raising: Callable[[BaseException], None], error: BaseException, code: int
) -> None:
    raising(error)
    result = run("doctor")
    assert result.exit_code == code
    assert "Traceback" not in result.stderr


def test_sigterm_unwinds() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, main._terminate)
        with pytest.raises(main.Terminated):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_a_closed_output_is_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m minishuffle.cli submit keyby --describe >&-', sys.executable],
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minishuffle.cli", "worker", "--help"], capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert b"start" in done.stdout
    assert b"kill" in done.stdout


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/state"),
            "Permission denied: '/state'; see to its permissions, or name another place with --state-dir",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/s"),
            "No space left on device: '/s'; make room on that disk, or name another place with --state-dir",
        ),
        (FileExistsError(errno.EEXIST, "File exists", "/state"), "File exists: '/state'"),
        (TimeoutError(), "TimeoutError"),
        (AssertionError(), "unexpected AssertionError; --debug shows where"),
        (KeyError("x"), "unexpected KeyError: 'x'; --debug shows where"),
    ],
)
def test_what_went_wrong_is_one_line_in_words(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report(error) == 1
    assert capsys.readouterr().err == f"minishuffle: {line}\n"
