"""The command line as a user has it: real processes, real signals, nothing left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
from click.testing import CliRunner

from minishuffle.cli.main import cli
from support.ports import free_ports
from support.waiting import until

pytestmark = pytest.mark.slow

SECONDS_MAX = 60.0

JOB = """
from minishuffle import Stream

def fail(word: str) -> str:
    raise ValueError(f"cannot take {word}")

broken = Stream.items(["a", "b"]).map(fail).collect()
fine = Stream.items(["a", "b", "a"]).key_by(lambda word: word).count().collect()
"""


class Shell:
    """Runs ``minishuffle`` with a state directory of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "minishuffle.cli", "--state-dir", str(self.state), *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, code: int = 0, seconds: float = SECONDS_MAX) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == code, f"{arguments} gave {process.returncode}\n{out}\n{err}"
        return out, err

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json")[0])

    def look(self, *arguments: str) -> Any:
        """:meth:`json` in this process, for commands that only ask and have run as their own before: to load
        what they need takes most of the time of each."""
        ran = CliRunner().invoke(cli, ["--state-dir", str(self.state), *arguments, "--json"])
        assert ran.exit_code == 0, ran.output
        return json.loads(ran.stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    state = tmp_path / "state"
    shell = Shell(state)
    yield shell
    record = state / "cluster.json"
    left = json.loads(record.read_text())["processes"].values() if record.exists() else []
    for process in shell.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=SECONDS_MAX)
    for entry in left:  # Of a detached cluster that a failed test did not bring down.
        try:
            process = psutil.Process(entry["pid"])
            if abs(process.create_time() - entry["started"]) < 2.0:
                process.kill()
        except psutil.NoSuchProcess:
            continue


@pytest.fixture
def secret(shell: Shell) -> Path:
    from minishuffle.config import create_secret

    shell.state.mkdir(mode=0o700)
    create_secret(shell.state / "secret")
    return shell.state / "secret"


def test_a_coordinator_says_where_it_listens_and_drains_on_ctrl_c(shell: Shell, secret: Path) -> None:
    process = shell.start("coordinator", "start", "--port", "0")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["ready"] == "coordinator"
    assert ready["pid"] == process.pid
    where = ["--coordinator", f"127.0.0.1:{ready['port']}"]
    status = shell.json(*where, "cluster", "status")
    assert status["pid"] == process.pid
    assert status["workers"] == []
    assert shell.json(*where, "jobs", "list") == {"jobs": []}
    _, unknown = shell.run(*where, "jobs", "show", "j9", code=2)
    assert "j9" in unknown
    assert len(unknown.splitlines()) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_coordinator_ends_in_order_on_sigterm_and_with_its_parent(shell: Shell, secret: Path) -> None:
    for flags, end in (([], "term"), (["--exit-with-parent"], "parent")):
        process = shell.start("coordinator", "start", "--port", "0", *flags)
        assert process.stdout is not None
        assert process.stdin is not None
        assert json.loads(process.stdout.readline())["port"]
        if end == "term":
            process.terminate()
        process.communicate(timeout=SECONDS_MAX)  # Closes its standard input.
        assert process.returncode == 0


PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "minishuffle.cli", *sys.argv[1:]], stdin=subprocess.PIPE).wait()
"""


def test_a_process_that_was_stopped_ends_with_its_parent(shell: Shell, secret: Path) -> None:
    """It does not run, so it cannot see for itself that its standard input has ended."""
    arguments = ["--state-dir", str(shell.state), "coordinator", "start", "--port", "0", "--exit-with-parent"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(json.loads(parent.stdout.readline())["pid"])
    try:
        child.suspend()
        until(lambda: child.status() == psutil.STATUS_STOPPED, "the stop")
        parent.kill()
        parent.communicate(timeout=20)  # The end of the output that both write to.
    finally:
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            child.kill()
        parent.communicate(timeout=SECONDS_MAX)


def test_a_taken_port_names_the_holder(shell: Shell, secret: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        out, err = shell.run("coordinator", "start", "--port", str(port), code=1)
    assert out == ""
    assert f"port {port} is taken by" in err
    assert f"(pid {os.getpid()})" in err
    assert "--port" in err
    assert len(err.splitlines()) == 1


def test_a_wrong_secret_is_refused(shell: Shell, secret: Path, tmp_path: Path) -> None:
    from minishuffle.config import create_secret

    create_secret(tmp_path / "other")
    process = shell.start("coordinator", "start", "--port", "0")
    assert process.stdout is not None
    port = json.loads(process.stdout.readline())["port"]
    for command in (["jobs", "list"], ["worker", "start"]):
        _, err = shell.run(
            "--coordinator", f"127.0.0.1:{port}", "--secret-file", str(tmp_path / "other"), *command, code=1
        )
        assert "secret" in err
        assert "Traceback" not in err
    process.terminate()
    _, log = process.communicate(timeout=SECONDS_MAX)
    assert "secret" in log


def check_that_signals_cancel(shell: Shell) -> None:
    """A command that waits for its job cancels it on Ctrl-C and on SIGTERM."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        waiting = shell.start("submit", "keyby", "--wait", "--set", "rate=100", "--name", number.name)
        assert waiting.stderr is not None
        assert "runs" in waiting.stderr.readline()
        waiting.send_signal(number)
        _, log = waiting.communicate(timeout=SECONDS_MAX)
        assert waiting.returncode == code, log


def check_that_failures_are_shown(shell: Shell, jobs: Path) -> None:
    """Each at once, and the last one with the user's traceback."""
    limit = ("--set", "restart_failures_max=2", "--parallelism", "1")
    _, failed = shell.run("submit", f"{jobs}:broken", "--wait", *limit, code=1)
    first, second = failed.splitlines()[1:3]
    assert "attempt 2 follows at once (failure 1 of 2): " in first and "ValueError: cannot take" in first
    assert second.startswith("minishuffle: job j2 (own.py:broken) failed: ")
    assert "ValueError: cannot take" in failed
    assert "own.py" in failed
    assert "minishuffle/worker" not in failed
    assert "failed 2 times within 300 s (restart_failures_max)" in failed


def check_that_a_pair_has_one_connection(shell: Shell) -> None:
    running = until(
        lambda: next((w for w in shell.look("cluster", "status")["workers"] if w["peers"]), None),
        "a data connection",
        SECONDS_MAX,
    )
    assert [peer["connections"] for peer in running["peers"]] == [1]


@pytest.mark.timeout(180)
def test_a_detached_cluster_from_up_to_down(shell: Shell, tmp_path: Path) -> None:
    port, web_port = free_ports(2)
    ports = ["--port", str(port), "--web-port", str(web_port)]
    out, _ = shell.run("cluster", "up", "--workers", "2", "--slots", "2", "--detach", *ports)
    assert f"127.0.0.1:{port}" in out
    assert "prometheus --config.file=" in out
    check_that_the_page_and_the_token_are_those_that_are_printed(shell, out, web_port)
    assert oct(shell.state.stat().st_mode & 0o777) == "0o700"
    assert oct((shell.state / "secret").stat().st_mode & 0o777) == "0o600"
    assert str(web_port) in (shell.state / "prometheus.yml").read_text()
    _, second = shell.run("cluster", "up", *ports, code=1)
    assert "already up" in second

    status = shell.json("cluster", "status")
    assert [worker["state"] for worker in status["workers"]] == ["alive", "alive"]
    pids = {worker["pid"] for worker in status["workers"]} | {status["pid"]}
    assert len(pids) == 3
    processes = list(map(psutil.Process, pids))

    (tmp_path / "own.py").write_text(JOB)
    done = shell.json("submit", f"{tmp_path / 'own.py'}:fine", "--wait")
    assert done["state"] == "finished"
    assert sorted(map(tuple, done["rows"])) == [("a", 2), ("b", 1)]
    check_that_failures_are_shown(shell, tmp_path / "own.py")

    submitted = shell.json("submit", "keyby", "--name", "endless", "--set", "rate=100")
    check_that_a_pair_has_one_connection(shell)
    check_that_signals_cancel(shell)
    check_that_a_savepoint_is_restored(shell, submitted["job"])
    cancelled = shell.json("jobs", "cancel", submitted["job"])
    assert cancelled["state"] == "canceled"
    states = {job["name"]: job["state"] for job in shell.look("jobs", "list")["jobs"]}
    ended = {"own.py:fine": "finished", "own.py:broken": "failed"}
    ended |= {"endless": "canceled", "restored": "canceled"}
    assert states == ended | {"SIGINT": "canceled", "SIGTERM": "canceled"}
    counted = shell.json("submit", "keyby", "--set", "records=1000", "--set", "rate=100000", "--wait")
    assert sum(sink["value"] for sink in counted["results"]) >= 1000
    shown = shell.look("jobs", "show", counted["job"])
    assert [t["result"] for t in shown["tasks"] if t["result"]] == [s["value"] for s in counted["results"]]
    assert {job["state"] for job in shell.look("cluster", "status")["jobs"]} == {
        "finished",
        "failed",
        "canceled",
    }
    events, _ = shell.run("jobs", "events", submitted["job"], "--json", "--follow")
    assert len([json.loads(line) for line in events.splitlines()]) >= 2

    shell.run("worker", "kill", "1")
    until(
        lambda: [w["state"] for w in shell.look("cluster", "status")["workers"]] == ["lost", "alive"],
        "the loss of worker 1",
        SECONDS_MAX,
    )
    shell.run("cluster", "down")
    assert not any(map(_runs, processes))
    assert not (shell.state / "cluster.json").exists()


def check_that_a_savepoint_is_restored(shell: Shell, job: str) -> None:
    """Of a job whose source has 100 records/s; not at another rate."""
    saved = shell.json("jobs", "savepoint", job)
    assert saved["bytes"] and Path(saved["path"]).parent == shell.state / "snapshots"
    again = ["submit", "keyby", "--name", "restored", "--from", saved["path"]]
    _, refused = shell.run(*again, code=2)
    assert "by its rate and records" in refused
    restored = shell.json(*again, "--set", "rate=100")
    assert "restored: from savepoint" in shell.run("jobs", "events", restored["job"])[0]
    assert shell.json("jobs", "cancel", restored["job"])["state"] == "canceled"


def check_that_the_page_and_the_token_are_those_that_are_printed(
    shell: Shell, printed: str, web_port: int
) -> None:
    (page,) = re.findall(r"web page +(http://\S+)", printed)
    assert page == f"http://127.0.0.1:{web_port}/"
    token = shell.run("cluster", "token")[0].strip()
    for given, status in ((token, 404), ("wrong", 401)):
        headers = {"Authorization": f"Bearer {given}"}
        cancel = Request(f"{page}api/v1/jobs/j9/cancel", method="POST", headers=headers)
        with pytest.raises(HTTPError) as refused:
            urlopen(cancel, timeout=SECONDS_MAX)
        with refused.value:
            assert refused.value.code == status


def _runs(process: psutil.Process) -> bool:
    """Whether it does, and not another one that has got its number since."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_foreground_cluster_leaves_nothing_behind(shell: Shell, number: int, code: int) -> None:
    port, web_port = free_ports(2)
    process = shell.start("cluster", "up", "--workers", "1", "--port", str(port), "--web-port", str(web_port))
    record = shell.state / "cluster.json"
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C" in line:
            break
    entries = json.loads(record.read_text())["processes"].values()
    processes = [psutil.Process(entry["pid"]) for entry in entries]
    assert all(map(_runs, processes))
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == code, errors
    assert not any(map(_runs, processes))
    assert not record.exists()


@pytest.mark.timeout(120)
def test_down_ends_a_cluster_whose_coordinator_is_stopped(shell: Shell) -> None:
    """And the command that would start it again."""
    process = shell.start("cluster", "up", "--workers", "1", "--port", "0")
    assert process.stdout is not None
    assert any("Ctrl-C" in line for line in process.stdout)
    record = json.loads((shell.state / "cluster.json").read_text())
    processes = [psutil.Process(entry["pid"]) for entry in record["processes"].values()]
    os.kill(record["processes"]["coordinator"]["pid"], signal.SIGSTOP)
    out, errors = shell.run("cluster", "down", seconds=75.0)
    assert out.startswith("cluster 'default' is down\n")
    assert f"pid {record['processes']['coordinator']['pid']}) is stopped and cannot end the cluster" in errors
    assert f"ending 'cluster up' (pid {process.pid}), which looks after the others" in errors
    _, said = process.communicate(timeout=1.0)  # Nothing of it runs any more.
    assert process.returncode == 143
    assert "is started again" not in said
    assert not any(map(_runs, processes))
    assert not (shell.state / "cluster.json").exists()
    _, ended = shell.run("cluster", "status", code=1)
    assert "cannot connect to" in ended


@pytest.mark.timeout(120)
def test_workers_end_when_the_process_that_started_them_is_killed(shell: Shell) -> None:
    port, web_port = free_ports(2)
    process = shell.start("cluster", "up", "--workers", "1", "--port", str(port), "--web-port", str(web_port))
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C" in line:
            break
    record = json.loads((shell.state / "cluster.json").read_text())
    process.kill()
    processes = [psutil.Process(entry["pid"]) for entry in record["processes"].values()]
    until(lambda: not any(map(_runs, processes)), "the end of the children", SECONDS_MAX)


@pytest.mark.timeout(120)
def test_ctrl_c_in_the_demo_leaves_nothing(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    process = shell.start("demo", "--only", "keyby")
    assert process.stdout is not None
    assert any(line.startswith("keyby:") for line in process.stdout)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS_MAX)
    # A shell says 130 of both: where Ctrl-C comes while exec() runs a text, as for a dataclass that is being
    # made, Python that was started with -m ends itself by SIGINT, whatever code is asked for.
    assert process.returncode in (130, -signal.SIGINT), errors
    assert "minishuffle: interrupted" in errors
    assert not any(map(_runs, children))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.timeout(120)
def test_a_demo_that_is_kept_leaves_time_to_look_at_its_page(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    process = shell.start("demo", "--only", "wordcount", "--keep")
    assert process.stdout is not None
    stays = re.compile(r"the cluster stays.*?(http\S+)")
    page = next(found[1] for line in process.stdout if (found := stays.search(line)))
    with urlopen(f"{page}api/v1/jobs", timeout=SECONDS_MAX) as response:
        states = {job["name"]: job["state"] for job in json.load(response)["jobs"]}
    assert states["keyby"] in ("created", "running")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, errors
    assert "all processes ended, state removed" in out
    assert list((tmp_path / "tmp").iterdir()) == []
