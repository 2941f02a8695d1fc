"""Bad input: one clear error each, nothing left behind, and everything else runs on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from click.testing import CliRunner

from minishuffle import limits
from minishuffle.api.stream import Stream, Table
from minishuffle.cli.main import cli
from minishuffle.client import Client
from minishuffle.errors import (
    AuthenticationError,
    ResourceExhausted,
    TaskFailed,
    UnknownName,
    UsageError,
)
from minishuffle.plan.graph import JobSettings
from support.ports import free_ports
from support.settings import NO_RESTARTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SECONDS_MAX = 60.0


# --- names that do not exist --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["submit", "keybi"], "did you mean 'keyby'?"),
        (["submit", "nowhere.py:job"], "there is no file nowhere.py"),
        (["submit", "keyby", "--set", "rat=1"], "did you mean 'rate'?"),
        (["submit", "keyby", "--set", "rate=fast"], "--set rate=fast"),
        (["submit", "wordcount", "--set", "files=/no/such.txt"], "no file /no/such.txt"),
        (["submit", "keyby", "--paralelism", "2"], "--parallelism"),
        (["jobs", "show", "j999"], "there is no job 'j999'"),
        (["worker", "kill", "99"], "99"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_unknown_names_are_one_line_with_exit_code_2(
    endless: Any, arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = len(endless.cluster.client.jobs())
    ran = CliRunner().invoke(cli, [*endless.flags, *arguments], prog_name="minishuffle")
    assert (ran.exit_code, ran.stdout) == (2, ""), ran.output
    assert expected in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(endless.cluster.client.jobs()) == before


def test_an_unknown_column_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"user": ["a"], "amount": [1]}), tmp_path / "t.parquet")
    with pytest.raises(UnknownName, match=r"(?s)'usr'.*user.*amount"):
        Table.from_files(tmp_path / "t.parquet").key_by("usr")
    with pytest.raises(UnknownName, match="no file .*none.parquet"):
        Table.from_files(tmp_path / "none.parquet")


def test_a_key_column_that_rows_turn_out_to_lack_is_named(endless: Any, goes_on: Callable[[], None]) -> None:
    stream = Stream.items([{"user": "a"}]).key_by("usr").count().collect()
    with pytest.raises(TaskFailed, match=r"usr"):
        endless.cluster.run(stream, timeout=SECONDS_MAX, settings=NO_RESTARTS)
    goes_on()


# --- functions and records ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (
            lambda table: table.map_batches(lambda batch: batch.to_pydict(), schema="same"),
            "the function of map_batches returned a dict: return a pyarrow.RecordBatch",
        ),
        (
            lambda table: table.map_batches(lambda batch: batch, schema={"k": int}),
            "column 's' is not in the declared schema (k): correct the schema",
        ),
        (lambda table: table.to_rows().flat_map(lambda row: row), "which is no list of rows: return [row]"),
    ],
    ids=["kind", "schema", "flat_map"],
)
def test_what_every_batch_would_do_wrong_fails_the_job_at_once(
    endless: Any, goes_on: Callable[[], None], job: Callable[[Table], Any], told: str
) -> None:
    table = Table.from_arrow(pa.table({"k": range(10), "s": ["x"] * 10}))
    with pytest.raises(TaskFailed) as caught:
        endless.cluster.run(job(table).collect(), timeout=SECONDS_MAX)
    assert told in str(caught.value)
    assert "times within" not in str(caught.value)
    goes_on()


def test_a_raising_function_shows_the_users_traceback_alone(
    endless: Any, goes_on: Callable[[], None]
) -> None:
    def inner(row: int) -> int:
        return {}[row]  # type: ignore[no-any-return]

    def outer(row: int) -> int:
        return inner(row)

    handle = endless.cluster.submit(
        Stream.items([1]).map(outer).collect(), name="raises", settings=NO_RESTARTS
    )
    with pytest.raises(TaskFailed) as raised:
        handle.wait(SECONDS_MAX)
    text = str(raised.value)
    assert re.search(r"in outer\n.*in inner\n", text, re.DOTALL)
    assert "KeyError: 1" in text
    assert "minishuffle/worker" not in text
    assert not any(f"minishuffle/{room}" in text for room in ("api", "operators", "plan"))
    assert handle.info().state == "failed"
    goes_on()


def test_an_unpicklable_function_is_refused_before_anything_is_submitted(endless: Any) -> None:
    lock = threading.Lock()

    def guarded(row: int) -> int:
        with lock:
            return row

    before = len(endless.cluster.client.jobs())
    with pytest.raises(UsageError, match=r"variable 'lock' of guarded.*create it inside the function"):
        endless.cluster.submit(Stream.items([1]).map(guarded).collect())
    assert len(endless.cluster.client.jobs()) == before


@pytest.mark.parametrize(
    ("value", "named"), [({1, 2}, "set"), (complex(1, 2), "complex"), (range(3), "range")], ids=repr
)
def test_a_record_that_msgpack_cannot_take_is_named(
    endless: Any, goes_on: Callable[[], None], value: object, named: str
) -> None:
    stream = Stream.items([0, 1]).map(lambda number: (number, value)).rebalance().map(str).collect()
    with pytest.raises(TaskFailed) as raised:
        endless.cluster.run(stream, parallelism=2, timeout=SECONDS_MAX, settings=NO_RESTARTS)
    assert named in str(raised.value)
    assert "cannot cross an exchange" in str(raised.value)
    assert repr(value) in str(raised.value)
    assert sorted(endless.cluster.run(Stream.items([1, 2]).collect(), timeout=SECONDS_MAX)) == [1, 2]
    goes_on()


def test_a_result_that_msgpack_cannot_take_fails_its_job_alone(
    endless: Any, goes_on: Callable[[], None]
) -> None:
    class Odd:
        def open(self, context: Any) -> None:
            pass

        def write(self, batch: Any) -> None:
            pass

        def close(self) -> Any:
            return object()

    with pytest.raises(TaskFailed, match="object"):
        endless.cluster.run(Stream.items([1]).to(Odd()), timeout=SECONDS_MAX, settings=NO_RESTARTS)
    goes_on()


# --- not enough of something ----------------------------------------------------------------------


@pytest.mark.usefixtures("wider_resources")  # A refused request has the client connect anew.
def test_too_many_slots_and_buffers_come_with_the_arithmetic(
    endless: Any, goes_on: Callable[[], None]
) -> None:
    numbers = Stream.items([1]).key_by(lambda number: number).count().collect()
    with pytest.raises(ResourceExhausted, match=r"needs 5 slots .*4 are free of 6.*--parallelism"):
        endless.cluster.submit(numbers, parallelism=5)
    greedy = JobSettings(buffers_per_channel=200)
    with pytest.raises(ResourceExhausted) as refused:
        endless.cluster.submit(numbers, parallelism=4, settings=greedy)
    text = str(refused.value)
    found = re.search(
        r"needs (\d+) network buffers on worker 1, (\d+) are free of (\d+) \((.*)\): raise", text
    )
    assert found is not None, text
    needed, free, total = int(found[1]), int(found[2]), int(found[3])
    assert needed > free
    assert free < total == (1 << 20) // (4096 + limits.SEGMENT_HEADROOM_BYTES)
    # The terms add up to what is said to be needed on each worker: two gates and two partitions, and another
    # gate for a restart.
    products = re.findall(r"= (\d+)(?:\)? = (\d+))?(?=;|$)", found[4])
    assert sum(int(last or first) for first, last in products) == needed == 3 * (4 * 200 + 1) + 2 * (4 + 1)
    assert "--network-memory-bytes" in text
    goes_on()


# --- ports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--port", "--web-port"])
def test_a_taken_port_is_named_with_its_holder_and_flag(
    command_line: Callable[[str], Any], flag: str, tmp_path: Path
) -> None:
    shell = command_line("taken")
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        ports = {"--port": str(free), "--web-port": "0"} | {flag: str(taken)}
        _, error = shell.run("cluster", "up", *(word for pair in ports.items() for word in pair), code=1)
    assert f"port {taken} " in error
    assert f"(pid {os.getpid()})" in error
    assert flag in error
    assert not (shell.state / "cluster.json").exists()


# --- two clusters, and Ctrl-C -----------------------------------------------------------------------


def test_two_clusters_run_side_by_side_and_do_not_mix(
    endless: Any, goes_on: Callable[[], None], command_line: Callable[[str], Any], is_running: Any
) -> None:
    other = command_line("other")
    other.run("--cluster", "other", "cluster", "up", "--detach", "--workers", "1", "--port", "0")
    pids = other.pids()
    record = json.loads((other.state / "cluster.json").read_text())
    assert record["coordinator"] != str(endless.cluster.client.address)
    assert set(pids).isdisjoint(endless.cluster.workers.values())
    done = json.loads(other.run("--cluster", "other", "submit", "wordcount", "--wait", "--json")[0])
    assert done["state"] == "finished"
    assert done["job"] == "j1"  # It counts its own jobs.
    # A client of one is turned away by the other, even with the other's secret.
    secret = (other.state / "secret").read_bytes().strip()
    with (
        Client(record["coordinator"], secret, cluster="local") as client,
        pytest.raises(AuthenticationError, match=r"cluster 'local'.*cluster 'other'"),
    ):
        client.status()
    other.run("--cluster", "other", "cluster", "down")
    assert not any(is_running(pid) for pid in pids)
    goes_on()


def test_ctrl_c_during_submit_wait_cancels_the_job_and_gives_130(
    endless: Any, wait_until: Callable[..., Any], is_running: Any
) -> None:
    program = [sys.executable, "-m", "minishuffle.cli"]
    process = subprocess.Popen(
        [*program, *endless.flags, "submit", "keyby", "--set", "rate=1000", "--wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        assert "runs" in process.stderr.readline()
        [job] = [job for job in endless.cluster.client.jobs() if job.name == "keyby"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()
        process.wait(SECONDS_MAX)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert endless.cluster.client.job(job.job).state == "canceled"


@pytest.mark.parametrize("arguments", [["cluster", "up", "--port", "0"], ["demo"]], ids=["up", "demo"])
def test_ctrl_c_while_processes_start_leaves_no_orphan(
    command_line: Callable[[str], Any],
    wait_until: Callable[..., Any],
    is_running: Any,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the most awkward moment: some children are there, none is ready yet."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    process = command_line("early").start(*arguments)
    parent = psutil.Process(process.pid)
    children = wait_until(lambda: parent.children(recursive=True), "the first child")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not any(is_running(child.pid) for child in children)
    left = [
        found.pid
        for found in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(found.info["cmdline"] or []) and is_running(found.pid)
    ]
    assert left == []
    assert not (tmp_path / "early" / "cluster.json").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
