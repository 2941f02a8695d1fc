import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from minishuffle.cli.jobs import _file_line, _parted, _run_and_wait, _show_canceled
from minishuffle.cli.loading import load_job
from minishuffle.cli.main import Terminated
from minishuffle.cli.tables import event_line
from minishuffle.client import Client, JobResult
from minishuffle.config import create_secret
from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.outputs import ListedFile
from minishuffle.wire.requests import JobEvent, JobInfo, TaskInfo

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


def test_describe_as_json_says_why_the_operators_are_not_known(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text("from minishuffle import Stream\n\njob = Stream.items([1]).map(str)\n")
    found = json.loads(run("submit", f"{file}:job", "--describe", "--json").stdout)
    assert found["operators"] is None
    assert found["problem"].startswith("the stream ends with 'map' and goes nowhere: end it with collect()")


def test_help_names_all_settings_of_jobs(run: Run) -> None:
    words = set(re.findall(r"\w+", run("submit", "--help").stdout))
    assert set(JobSettings.model_fields) - words == set()


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
            "--set keys=0: Input should be greater than or equal to 1 (keys takes int)",
        ),
        (["keyby", "--set", "keys=-3"], "--set keys=-3: Input should be greater than or equal to 1"),
        (["keyby", "--set", "speed=1"], "--set speed: there is no such parameter"),
        (["keyby", "--set", "guarante=loss"], "no such parameter or setting; did you mean 'guarantee'?"),
        (["keyby", "--set", "snapshot_intervall=2"], "did you mean 'snapshot_interval'?"),
        (
            ["keyby", "--set", "buffer_timeout=soon"],
            "--set buffer_timeout=soon: Input should be 'adaptive', or Input should be a valid number",
        ),
        (["keyby", "--set", "buffer_timeout=-0.5"], "Input should be seconds from 0 on, or -1"),
        (
            ["keyby", "--set", "schedule=eager", "--set", "start_when=any"],
            "--set schedule=eager --set start_when=any: start_when is about schedules that wait for inputs: "
            "set schedule to first_output or stages",
        ),
        (["keyby", "--set", "floating_buffers_per_gate=0"], "Input should be greater than or equal to 1"),
        (["keyby", "--set", f"buffers_per_channel={10**20}"], "Input should be less than or equal to"),
        (["wordcount", "--set", "files=/absent/file.txt"], "/absent/file.txt"),
        (["keyby", "--drop-state", "count"], "--drop-state and --trust-snapshot go with --from PATH"),
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

    def wait(self, *, allow_loss: bool, warn: bool) -> None:
        assert allow_loss
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

    def wait_until_over(self, seconds: float) -> JobInfo:
        self.asked.append("wait until over")
        return JobInfo(job="j1", name="endless", state="canceled", submitted_at=0.0)


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


class Lossy(Cluster):
    """One whose job restarts a task twice and ends with less than all rows."""

    def __init__(self) -> None:
        super().__init__(AssertionError())

    def events(self, follow: bool) -> Iterator[JobEvent]:
        assert follow
        texts = {
            "task failed": "count[0]: ZeroDivisionError: division by zero",
            "task restarting": "attempt 2 follows at once (failure 1 of 10): count[0]: ZeroDivisionError",
            "task waiting for a slot": "no other worker has a free slot; waits 60 s at most",
            "task running": "count[0]",
        }
        for number, (kind, text) in enumerate(texts.items()):
            yield JobEvent(
                number=number,
                at=0.0,
                kind=kind,
                text=text,
                operator=1,
                index=0,
                attempt=1,
                worker=2,
                since=0.0125 if kind == "task waiting for a slot" else 0.0,
            )

    def wait(self, *, allow_loss: bool, warn: bool) -> Any:
        return JobResult("j1", "lossy", "finished_with_loss", [], [], 1.5, {"collect": [[7]]})

    def info(self) -> JobInfo:
        dropped = {"queue_discarded": 1200}
        return JobInfo(
            job="j1",
            name="lossy",
            state="finished_with_loss",
            submitted_at=0.0,
            restarts={"failed": 1, "lost": 1},
            rows_dropped=dropped,
            rows_in_flight=30,
        )


def test_who_waits_sees_each_failure_and_what_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Lossy()
    result, _ = _run_and_wait(cluster, cluster.submit, as_json=False)  # type: ignore[arg-type]
    assert result.state == "finished_with_loss"
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["7", "job j1 (lossy) is finished_with_loss after 1.50 s"]
    lines = shown.err.splitlines()
    assert [line.partition(" ")[2] for line in lines[1:3]] == [
        "task restarting 1.0#1 on worker 2: attempt 2 follows at once (failure 1 of 10): count[0]: "
        "ZeroDivisionError",
        "task waiting for a slot 1.0#1 on worker 2 +12.5 ms: no other worker has a free slot; waits 60 s at "
        "most",
    ]
    assert lines[3:] == [
        "minishuffle: job j1 (lossy) finished, but rows were lost in 2 restarts, the first after: count[0]: "
        "ZeroDivisionError: division by zero; lost: 1,200 on their way to a task that ended, up to 30 in "
        "flight through what died; see "
        "'minishuffle jobs events j1'; with --allow-loss the exit code is 0 "
        "(minishuffle explain MS-162)"
    ]


def test_events_are_shown_by_time_unless_they_are_followed(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_secret(own_state / "secret")
    known = [JobEvent(number=n, at=at, kind=f"k{n}", text="x") for n, at in ((1, 5.0), (2, 9.0), (3, 7.0))]
    monkeypatch.setattr(Client, "events", lambda *_: iter(known))
    for flags, order in (([], [1, 3, 2]), (["--follow"], [1, 2, 3])):
        shown = run("jobs", "events", "j1", "--json", *flags).stdout.splitlines()
        assert [json.loads(line)["number"] for line in shown] == order


def test_an_event_of_a_failure_has_the_users_traceback_under_it() -> None:
    event = JobEvent(
        number=1, at=0.0, kind="task failed", text="map[0]: KeyError: 'a'", traceback="one\ntwo\n"
    )
    assert event_line(event).endswith(" task failed: map[0]: KeyError: 'a'\n    one\n    two")


@pytest.mark.parametrize(("flags", "code"), [([], 3), (["--allow-loss"], 0)])
def test_a_wait_for_a_job_that_lost_rows_exits_with_3_unless_that_is_allowed(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], code: int
) -> None:
    create_secret(own_state / "secret")
    cluster = Lossy()
    monkeypatch.setattr(Client, "submit", lambda *_, submission, **__: cluster.submit(submission))
    result = run("submit", "keyby", "--wait", "--json", *flags)
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert (found["state"], found["rows"]) == ("finished_with_loss", [7])
    assert "lost: 1,200 on their way" in result.stderr


class Careless(Lossy):
    """One whose job finishes, and leaves out some records."""

    def wait(self, *, allow_loss: bool, warn: bool) -> Any:
        return JobResult("j1", "careless", "finished", [], [], 1.5, {"collect": [[7]]})

    def info(self) -> JobInfo:
        counters = TaskCounters(records_late=3, late_dropped=3, user_errors={"dead_letter": 2})
        task = TaskInfo(
            operator=0, name="map", index=0, attempt=1, state="finished", worker=1, counters=counters
        )
        return JobInfo(job="j1", name="careless", state="finished", submitted_at=0.0, tasks=[task])


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--strict"], 3)])
def test_a_wait_counts_what_was_left_out_and_exits_with_3_if_there_is_to_be_nothing(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], code: int
) -> None:
    create_secret(own_state / "secret")
    cluster = Careless()
    monkeypatch.setattr(Client, "submit", lambda *_, submission, **__: cluster.submit(submission))
    result = run("submit", "keyby", "--wait", *flags)
    assert result.exit_code == code, result.output
    assert "3 records came too late and were dropped" in result.stdout
    assert "2 records are dead letters" in result.stdout
    found = json.loads(run("submit", "keyby", "--wait", "--json", *flags).stdout)
    assert found["left_out"] == {"late": 3, "dead_letters": 2}


def test_a_cancel_counts_the_files_of_all_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    left = JobInfo(job="j1", name="words", state="canceled", submitted_at=1.0, tasks=[], causes=[])
    _show_canceled(left)
    _show_canceled(left.model_copy(update={"files_listed": 12, "file_rows": 4032}))
    assert capsys.readouterr().out == "files completed: 12 with 4,032 rows\n"


def test_a_file_that_may_still_be_hidden_is_shown_with_that_name() -> None:
    fields: dict[str, Any] = {
        "operator": 1,
        "index": 0,
        "attempt": 1,
        "rows": 5,
        "bytes": 9,
        "checksum": "ab",
    }
    file = ListedFile(path="/d/part-00000.parquet", **fields)
    assert _file_line("j1", file) == "/d/part-00000.parquet: 5 rows, 9 bytes, sha256 ab"
    hidden = _file_line("j1", file.model_copy(update={"named": False}))
    assert "if it is not there, it is /d/.j1.*.part-00000.parquet" in hidden
