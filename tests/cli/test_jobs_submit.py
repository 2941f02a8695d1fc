import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from minishuffle.cli.jobs import _wait
from minishuffle.cli.main import Terminated
from minishuffle.config import create_secret
from minishuffle.errors import PeerLost, UsageError

Run = Callable[..., Result]


def test_describe_lists_parameters_and_operators(run: Run) -> None:
    result = run("submit", "keyby", "--describe")
    assert result.exit_code == 0, result.output
    assert "  rate: int = 20000" in result.stdout
    assert "  records: int | None = None" in result.stdout
    assert "  keys: int = 1000" in result.stdout
    assert "operators" in result.stdout


def test_describe_as_json_is_one_object(run: Run) -> None:
    found = json.loads(run("submit", "keyby", "--describe", "--json").stdout)
    assert found["job"] == "keyby"
    assert [p["name"] for p in found["parameters"]] == ["rate", "records", "keys"]
    assert found["parameters"][0] == {"name": "rate", "type": "int", "required": False, "default": 20_000}
    assert len(found["operators"]) >= 2


def test_describe_needs_no_cluster_and_checks_settings(run: Run) -> None:
    result = run("submit", "keyby", "--describe", "--set", "rate=fast")
    assert result.exit_code == 2
    assert "--set rate=fast: Input should be a valid integer" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["keybee"], "did you mean 'keyby'?"),
        (
            ["keyby", "--set", "keys=0"],
            "--set keys=0: Input should be greater than or equal to 1 (it is int)",
        ),
        (["keyby", "--set", "keys=-3"], "--set keys=-3: Input should be greater than or equal to 1"),
        (["keyby", "--set", "speed=1"], "--set speed: there is no such parameter"),
        (["wordcount", "--set", "files=/absent/file.txt"], "/absent/file.txt"),
        (["keyby"], "there is no secret at"),
    ],
)
def test_bad_submissions_are_one_line_and_exit_code_2(run: Run, arguments: list[str], text: str) -> None:
    result = run("submit", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_empty_name_is_refused(run: Run, own_state: Path) -> None:
    create_secret(own_state / "secret")
    result = run("submit", "keyby", "--name", "")
    assert result.exit_code == 2
    assert "a job's name has 1 to 128 bytes, all printable, not ''" in result.stderr


class Waited:
    """A job's handle whose wait ends with ``error``; notes what is asked of it."""

    id, name, parallelism = "j1", "endless", 1

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.asked: list[str] = []

    def wait(self) -> None:
        raise self.error

    def cancel(self) -> None:
        self.asked.append("cancel")
        raise UsageError("it is over already")

    def wait_until_over(self, seconds: float) -> None:
        self.asked.append("wait until over")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated()])
def test_a_wait_that_a_signal_ends_cancels_the_job(error: BaseException) -> None:
    handle = Waited(error)
    with pytest.raises(type(error)):
        _wait(handle, as_json=True)  # type: ignore[arg-type]
    assert handle.asked == ["cancel", "wait until over"]


def test_a_wait_that_loses_the_cluster_asks_it_nothing_more() -> None:
    handle = Waited(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        _wait(handle, as_json=True)  # type: ignore[arg-type]
    assert handle.asked == []
