import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from click.testing import Result

from minishuffle.cli import cluster, ownprocesses
from minishuffle.config import TlsFiles, create_secret
from minishuffle.errors import ShuffleError
from minishuffle.transport.credentials import Credentials
from support.certificates import files_of

Run = Callable[..., Result]


def write_record(directory: Path, pid: int) -> Path:
    started = psutil.Process(pid).create_time()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "cluster.json"
    record = {"coordinator": "127.0.0.1:1", "processes": {"coordinator": {"pid": pid, "started": started}}}
    path.write_text(json.dumps(record))
    return path


def test_up_on_a_taken_port_names_the_holder_and_starts_nothing(run: Run, own_state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run("cluster", "up", "--port", str(port))
        web = run("cluster", "up", "--port", "0", "--web-port", str(port))
    assert (result.exit_code, web.exit_code) == (1, 1)
    assert f"port {port} is taken by" in result.stderr
    assert f"(pid {os.getpid()})" in result.stderr
    assert result.stderr.rstrip().endswith("--port (minishuffle explain MS-150)")
    assert web.stderr.rstrip().endswith("--web-port (minishuffle explain MS-150)")
    assert not own_state.exists()


@pytest.mark.parametrize("command", [("cluster", "up"), ("coordinator", "start")])
def test_one_port_for_two_servers_is_refused(run: Run, own_state: Path, command: tuple[str, ...]) -> None:
    own_state.mkdir(parents=True)
    create_secret(own_state / "secret")
    result = run(*command, "--port", "8471", "--web-port", "8471")
    assert result.exit_code == 2
    assert "--port and --web-port are both 8471" in result.stderr


def test_up_refuses_bad_settings(run: Run, own_state: Path) -> None:
    result = run("cluster", "up", "--slots", "0")
    assert result.exit_code == 2
    assert "slots" in result.stderr
    assert not own_state.exists()


def test_up_refuses_files_for_tls_that_do_not_fit(run: Run, own_state: Path) -> None:
    files = [word for name, path in files_of()._asdict().items() for word in (f"--tls-{name}", path)]
    for options, problem in (
        (["--tls", *files], "--tls makes certificates: leave it out, or the options that name files"),
        (files[:4], "tls_certificate, tls_key and tls_ca go together: set all three, or none"),
        ([*files, "--tls-key", files_of("another").key], "is not that of the certificate in"),
        (["--tls-http-clients", "certificate"], "tls_http_clients is certificate, and there is no TLS"),
    ):
        result = run("cluster", "up", *options)
        assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not own_state.exists()


def test_certificates_are_made_for_the_hosts_that_are_named(run: Run, tmp_path: Path) -> None:
    made = run(
        "cluster", "certificate", str(tmp_path / "n"), "--host", "node", "--authority", str(tmp_path / "ca")
    )
    assert made.exit_code == 0, made.stderr
    named = [json.loads(line.partition(" = ")[2]) for line in made.stdout.splitlines()]
    assert made.stdout.startswith(f'tls_certificate = "{tmp_path}/n/certificate.pem"')
    Credentials(TlsFiles(*named)).check_host("node")


def test_standby_workers_are_not_for_executors(run: Run, own_state: Path) -> None:
    result = run("cluster", "up", "--on-spark", "local[1]", "--standby", "1")
    assert result.exit_code == 2
    assert "lost workers on Spark's executors are ordered anew: leave out --standby" in result.stderr
    assert not own_state.exists()


def test_a_second_up_says_that_it_is_up(run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(own_state, os.getpid())
    monkeypatch.setattr(ownprocesses, "is_minishuffle", lambda pid, started: pid == os.getpid())
    result = run("cluster", "up")
    assert result.exit_code == 1
    assert f"cluster 'default' is already up at 127.0.0.1:1 (pid {os.getpid()})" in result.stderr


def test_up_while_another_one_starts_names_it_and_starts_nothing(run: Run, own_state: Path) -> None:
    own_state.mkdir(parents=True)
    lock = own_state / "starting.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711\n")
        file.flush()
        result = run("cluster", "up", "--detach", "--port", "0")
    assert result.exit_code == 1
    assert result.stderr == (
        f"minishuffle: another 'cluster up' (pid 4711) is starting a cluster in {own_state}: "
        "wait until it is up, or start another with --cluster NAME or --state-dir "
        "(minishuffle explain MS-150)\n"
    )
    assert [*own_state.iterdir()] == [lock]


def test_the_lock_of_a_start_that_was_killed_is_free(own_state: Path) -> None:
    own_state.mkdir(parents=True)
    lock = own_state / "starting.lock"
    lock.write_text("1234567890\n")
    with cluster._starting_alone(cluster.Session()):
        assert lock.read_text() == f"{os.getpid()}\n"


def test_a_coordinator_that_took_a_cluster_back_is_seen_by_up_and_named_by_down(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not on record, and here it answers nobody, as a stopped process does."""
    path = write_record(own_state, os.getpid())
    create_secret(own_state / "secret")
    record = json.loads(path.read_text())
    with socket.create_server(("127.0.0.1", 0)) as server:
        record["coordinator"] = address = f"127.0.0.1:{server.getsockname()[1]}"
        worker = {"pid": os.getpid() + 1, "started": 0.0}
        path.write_text(json.dumps({**record, "processes": {**record["processes"], "worker-1": worker}}))
        with monkeypatch.context() as patch:
            patch.setattr(ownprocesses, "is_minishuffle", lambda pid, started: pid == worker["pid"])
            up = run("--cluster", "default", "cluster", "up")
        monkeypatch.setattr("minishuffle.cli.session.Session.client.__wrapped__.__defaults__", (0.2,))
        down = run("cluster", "down")
    assert (up.exit_code, down.exit_code) == (1, 1)
    assert f"already up at {address} (" in up.stderr and f"(pid {os.getpid()})" in up.stderr
    assert f"has ended, but at {address} listens, and does not answer, '" in down.stderr
    assert f"(pid {os.getpid()})" in down.stderr and "is down" not in down.stdout


def test_down_without_a_cluster_says_so(run: Run, own_state: Path) -> None:
    own_state.mkdir(parents=True)
    create_secret(own_state / "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = run("cluster", "down", "--coordinator", f"127.0.0.1:{port}")
    assert result.exit_code == 1
    assert "cannot connect to" in result.stderr


@pytest.mark.parametrize(
    "command", ["cluster status", "cluster down", "jobs list", "jobs show j1", "top", "diagnose", "dump"]
)
def test_what_asks_a_cluster_that_is_down_says_so_and_how_it_starts(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    other = own_state.parent / "other"
    for directory in (own_state, other):
        directory.mkdir(parents=True)
        create_secret(directory / "secret")
    monkeypatch.setattr("minishuffle.cli.session.DEFAULT_PORT", 1)
    for flags, name in ([], "default"), (["--state-dir", str(other), "--cluster", "blue"], "blue"):
        result = run(*command.split(), *flags)
        assert (result.exit_code, result.stderr) == (
            1,
            f"minishuffle: cluster {name!r} is down: '{' '.join(['minishuffle', *flags])} cluster up' starts "
            "it (minishuffle explain MS-140)\n",
        )
    lost = run(*command.split(), "--coordinator", "127.0.0.1:1")
    assert "cannot connect to 127.0.0.1:1" in lost.stderr


def test_down_ends_no_process_that_is_not_ours(run: Run, own_state: Path) -> None:
    path = write_record(own_state, os.getpid())
    create_secret(own_state / "secret")
    result = run("cluster", "down")
    assert result.exit_code == 0, result.output
    assert not path.exists()


def test_down_waits_for_a_coordinator_that_another_down_has_stopped_and_says_so(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(own_state, os.getpid())
    create_secret(own_state / "secret")
    looks = iter([True] * 4)
    sent: list[int] = []
    monkeypatch.setattr(cluster, "NOTE_SECONDS", 0.0)
    monkeypatch.setattr(ownprocesses, "is_minishuffle", lambda pid, started: next(looks, False))
    monkeypatch.setattr(cluster.os, "kill", lambda pid, number: sent.append(number))
    result = run("cluster", "down")
    assert (result.exit_code, sent) == (0, [])
    assert result.stderr == f"waiting for coordinator (pid {os.getpid()}) to end\n"


def test_a_cluster_whose_record_cannot_be_written_runs_on(
    own_state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(session: Any, processes: Any, host: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    record = Mock(record_path=lambda: own_state / "cluster.json")
    monkeypatch.setattr(cluster, "_write_record", full)
    assert not cluster._record_again(record, Mock(), "127.0.0.1", warns=True)
    assert "cluster.json cannot be written (No space left on device)" in capsys.readouterr().err
    assert not cluster._record_again(record, Mock(), "127.0.0.1", warns=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cluster, "_write_record", lambda session, processes, host: None)
    assert cluster._record_again(record, Mock(), "127.0.0.1", warns=False)


def test_down_ends_first_what_would_start_others_and_then_what_that_has_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {
        "processes": {"coordinator": {"pid": 1, "started": 0.0}},
        "launcher": {"pid": 2, "started": 0.0},
    }
    later = {**record, "processes": {"coordinator": {"pid": 3, "started": 0.0}}}
    running, sent = {1, 2, 3}, list[int]()

    def kill(pid: int, number: int) -> None:
        sent.append(pid)
        running.discard(pid)

    monkeypatch.setattr(ownprocesses, "is_minishuffle", lambda pid, started: pid in running)
    monkeypatch.setattr(cluster.os, "kill", kill)
    monkeypatch.setattr(cluster, "ENDING_SECONDS", 0.0)
    cluster._end_recorded(Mock(record=lambda: later), record, 0.0)
    assert sent == [2, 3]
    assert capsys.readouterr().err == "ending 'cluster up' (pid 2), which looks after the others\n"


def test_a_second_up_sees_a_first_one_that_starts_its_coordinator_again(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_record(own_state, os.getpid())
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "launcher": {"pid": 4711, "started": 0.0}}))
    monkeypatch.setattr(ownprocesses, "is_minishuffle", lambda pid, started: pid == 4711)
    result = run("cluster", "up")
    assert result.exit_code == 1
    assert "cluster 'default' is already up at 127.0.0.1:1 ('cluster up', pid 4711)" in result.stderr


def test_a_process_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(ownprocesses, "is_minishuffle", lambda pid, started: True)
    monkeypatch.setattr(cluster.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(cluster.time, "monotonic", iter(range(0, 1000, 10)).__next__)
    record = {"processes": {"worker-1": {"pid": 1, "started": 0.0}}}
    with pytest.raises(ShuffleError, match=r"worker-1 \(pid 1\) does not end"):
        cluster._end_recorded(Mock(), record, 5.0)
    assert sent == [15, 9]


def test_a_worker_on_a_processor_that_is_not_there_says_which_are(run: Run, own_state: Path) -> None:
    result = run("worker", "start", "--processor", "65535")
    assert result.exit_code == 2
    usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    assert f"--processor 65535: this process may use {usable}" in result.stderr
    assert not own_state.exists()


RUNNING = {
    "processes": {"coordinator": {"pid": 71, "started": 0.0}, "worker 1": {"pid": 72, "started": 0.0}},
    "launcher": None,
}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Processes 71 and 72 are found by their command lines; gives which signals they got."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(cluster, "own_processes", lambda directory: RUNNING)
    monkeypatch.setattr("minishuffle.cli.session.own_processes", lambda directory: RUNNING)
    monkeypatch.setattr(
        ownprocesses,
        "is_minishuffle",
        lambda pid, started: pid in (71, 72) and pid not in [each for each, _ in sent],
    )
    monkeypatch.setattr(cluster.os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def test_without_its_state_directory_a_cluster_is_named_by_all_commands_and_ended_by_down(
    run: Run, own_state: Path, ended: list[tuple[int, int]]
) -> None:
    for command in (("cluster", "status"), ("jobs", "list"), ("cluster", "up", "--port", "0")):
        refused = run(*command)
        assert refused.exit_code == 2
        assert refused.stderr == (
            f"minishuffle: the state directory {own_state} is gone, and of cluster 'default' there run "
            "coordinator (pid 71), worker 1 (pid 72): 'minishuffle cluster down' stops them\n"
        )
    assert not ended and not own_state.exists()
    down = run("cluster", "down")
    assert (down.exit_code, down.stdout) == (0, "cluster 'default' is down\n"), "nothing stays to delete"
    assert down.stderr == (
        f"the state directory {own_state} is gone; ending coordinator (pid 71), worker 1 (pid 72)\n"
    )
    assert ended == [(71, 15), (72, 15)]


@pytest.mark.parametrize("recorded", [True, False])
def test_without_the_secret_a_cluster_is_ended_by_process_id(
    run: Run, own_state: Path, ended: list[tuple[int, int]], recorded: bool
) -> None:
    own_state.mkdir(parents=True)
    if recorded:
        record = {**RUNNING, "coordinator": "127.0.0.1:1"}
        (own_state / "cluster.json").write_text(json.dumps(record))
    refused = run("jobs", "list")
    assert refused.exit_code == 2
    assert f"the secret at {own_state / 'secret'} is gone, and of cluster" in refused.stderr
    down = run("cluster", "down")
    assert down.exit_code == 0, down.stderr
    assert down.stdout.startswith(
        f"cluster 'default' is down\n{own_state} stays, with the history of its jobs ("
    )
    assert f"the secret at {own_state / 'secret'} is gone; ending coordinator (pid 71), w" in down.stderr
    assert ended == [(71, 15), (72, 15)]
    assert not (own_state / "cluster.json").exists()


def test_what_no_coordinator_leads_and_nothing_records_is_ended_unless_another_place_was_named(
    run: Run, own_state: Path, ended: list[tuple[int, int]]
) -> None:
    own_state.mkdir(parents=True)
    create_secret(own_state / "secret")
    (own_state / "coordinator.json").write_text('{"coordinator": "127.0.0.1:1", "term": 1}')
    elsewhere = run("cluster", "down", "--coordinator", "127.0.0.1:1")
    assert elsewhere.exit_code == 1 and "cannot connect to 127.0.0.1:1" in elsewhere.stderr
    assert not ended
    down = run("cluster", "down")
    assert down.exit_code == 0 and down.stdout.startswith("cluster 'default' is down\n")
    assert "cannot connect to 127.0.0.1:1: Connection refused" in down.stderr
    assert "; ending coordinator (pid 71), worker 1 (pid 72)\n" in down.stderr
    assert ended == [(71, 15), (72, 15)]
