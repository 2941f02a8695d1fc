import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from minishuffle.cli.jobs import _parted, _run_and_wait
from minishuffle.cli.loading import load_job
from minishuffle.cli.main import Terminated
from minishuffle.config import create_secret
from minishuffle.dataflow.graph import JobSettings
from minishuffle.errors import PeerLost

Run = Callable[..., Result]


def test_describe_lists_parameters_and_operators(run: Run) -> None:
    result = run("submit", "keyby", "--describe")
    assert result.exit_code == 0, result.output
    assert "  rate: int = 20000" in result.stdout
    assert "  records: int | None = None" in result.stdout
    assert "  keys: int = 1000" in result.stdout
    assert "operators" in result.stdout


def test_settings_of_every_job_are_parted_from_the_parameters_of_this_one() -> None:
    given = ("rate=5", "buffer_timeout=0", "keys=7", "buffers_per_channel=3")
    parameters, settings = _parted(load_job("keyby"), given)
    assert parameters == ("rate=5", "keys=7")
    assert settings == JobSettings(buffer_timeout=0, buffers_per_channel=3)
    assert _parted(load_job("keyby"), ()) == ((), JobSettings())


def test_describe_as_json_is_one_object(run: Run) -> None:
    found = json.loads(run("submit", "keyby", "--describe", "--json").stdout)
    assert found["job"] == "keyby"
    assert [p["name"] for p in found["parameters"]] == ["rate", "records", "keys", "delay"]
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
        (
            ["keyby", "--set", "buffer_timeout=soon"],
            "--set buffer_timeout=soon: Input should be 'adaptive', or Input should be a valid number",
        ),
        (["keyby", "--set", "buffer_timeout=-0.5"], "Input should be seconds from 0 on, or -1"),
        (["keyby", "--set", "floating_buffers_per_gate=0"], "Input should be greater than or equal to 1"),
        (["keyby", "--set", f"buffers_per_channel={10**20}"], "Input should be less than or equal to"),
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


class Cluster:
    """A client whose job ends with ``error`` where ``at`` says; notes what is asked of it."""

    id, name, parallelism = "j1", "endless", 1

    def __init__(self, error: BaseException, at: str = "wait") -> None:
        self.error, self.at = error, at
        self.submission = ""
        self.asked: list[str] = []

    def submit(self, submission: str) -> Any:
        self.submission = submission
        if self.at == "submit":
            raise self.error
        return self

    def wait(self) -> None:
        raise self.error

    def cancel_submission(self, submission: str) -> str:
        assert submission == self.submission
        self.asked.append("cancel")
        if self.at == "cancel":
            raise PeerLost("gone")
        return "" if self.at == "submit" else "j1"

    def handle(self, job: str) -> Any:
        assert job == "j1"
        return self

    def wait_until_over(self, seconds: float) -> None:
        self.asked.append("wait until over")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated()])
@pytest.mark.parametrize(("at", "asked"), [("wait", ["cancel", "wait until over"]), ("submit", ["cancel"])])
def test_a_signal_at_any_time_cancels_the_job(error: BaseException, at: str, asked: list[str]) -> None:
    cluster = Cluster(error, at)
    with pytest.raises(type(error)):
        _run_and_wait(cluster, cluster.submit, as_json=True)  # type: ignore[arg-type]
    assert cluster.asked == asked
    assert cluster.submission


def test_a_cancel_that_is_not_answered_is_said_and_the_signal_still_ends_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster(KeyboardInterrupt(), "cancel")
    with pytest.raises(KeyboardInterrupt):
        _run_and_wait(cluster, cluster.submit, as_json=True)  # type: ignore[arg-type]
    assert "the job may still run: gone; see 'minishuffle jobs list'" in capsys.readouterr().err


def test_a_wait_that_loses_the_cluster_asks_it_nothing_more() -> None:
    cluster = Cluster(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        _run_and_wait(cluster, cluster.submit, as_json=True)  # type: ignore[arg-type]
    assert cluster.asked == []
