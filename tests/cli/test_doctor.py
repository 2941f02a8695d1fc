import json
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from minishuffle.cli import doctor

Run = Callable[..., Result]


def test_doctor_says_what_there_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISHUFFLE_SNAPSHOT_MEMORY_BYTES", str(3 << 20))
    found = json.loads(run("doctor", "--json").stdout)
    names = [check["name"] for check in found["checks"]]
    assert names[:3] == ["Python", "uvloop", "pyarrow"]
    assert "Prometheus" in names
    by_name = {check["name"]: check for check in found["checks"]}
    assert "up to 3.0 MiB of snapshots in it (snapshot_memory_bytes)" in by_name["memory"]["found"]
    assert by_name["Python"]["ok"] and by_name["uvloop"]["ok"] and by_name["loopback"]["ok"]


def test_what_is_missing_comes_with_its_fix(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/absent")
    monkeypatch.setattr(doctor, "MEMORY_BYTES", 1 << 60)
    result = run("doctor")
    assert result.exit_code == 1
    assert "apt-get install prometheus" in result.stdout
    assert "--network-memory-bytes" in result.stdout


def snapshots(run: Run) -> dict[str, Any]:
    found = json.loads(run("doctor", "--json").stdout)["checks"]
    check: dict[str, Any] = next(check for check in found if check["name"] == "snapshot_dir")
    return check


def test_whether_snapshots_can_be_written_is_tried(
    run: Run, own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = snapshots(run)
    assert check["ok"]
    assert check["found"].startswith(f"{own_state}/snapshots: written and read in ")
    assert check["found"].endswith(" free")
    assert not own_state.exists()
    (own_state / "snapshots").mkdir(parents=True)
    assert snapshots(run)["ok"]
    assert list((own_state / "snapshots").iterdir()) == []
    monkeypatch.setattr(doctor, "SNAPSHOT_BYTES", 1 << 80)
    assert snapshots(run)["fix"] == "make room; only for savepoints"
    (own_state / "snapshots").rmdir()
    (own_state / "snapshots").write_text("a file")
    check = snapshots(run)
    assert not check["ok"] and not check["needed"]
    assert f"{own_state}/snapshots/.doctor-" in check["found"]
    assert "name another with snapshot_dir" in check["fix"]


def test_an_optional_gap_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(doctor, "DEFAULT_PORT", server.getsockname()[1])
        check = doctor._port(doctor.DEFAULT_PORT, "--port")
    assert not check.ok
    assert not check.needed
    assert "pid" in check.found


def test_a_java_that_will_not_do_is_named_with_what_it_lacks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"'\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = json.loads(run("doctor", "--json").stdout)
    check = next(check for check in found["checks"] if check["name"] == "Java")
    assert not check["ok"] and not check["needed"]
    assert str(java) in check["found"] and "lacks the module jdk.incubator.vector" in check["found"]
    assert "apt-get install openjdk-17-jre-headless" in check["fix"]


@pytest.mark.parametrize(
    "versions, found, fix",
    [
        ({"pyspark": "4.3.0", "pandas": "2.3.3"}, "4.3.0, pandas 2.3.3", ""),
        ({"pyspark": "4.3.0"}, "pandas is missing", "pip install 'minishuffle[spark]'"),
        ({}, "pyspark is missing", "pip install 'minishuffle[spark]'"),
        ({"pyspark": "4.3.0", "pandas": "3.0.0"}, "4.3.0, pandas 3.0.0", "pip install 'pandas<3'"),
    ],
)
def test_what_runs_on_spark_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], found: str, fix: str
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", version)
    check = doctor._spark()
    assert (check.ok, check.found, check.needed) == (not fix, found, False)
    assert check.fix.startswith(fix)
