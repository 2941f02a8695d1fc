import json
import socket
from collections.abc import Callable

import pytest
from click.testing import Result

from minishuffle.cli import doctor

Run = Callable[..., Result]


def test_doctor_says_what_there_is(run: Run) -> None:
    found = json.loads(run("doctor", "--json").stdout)
    names = [check["name"] for check in found["checks"]]
    assert names[:3] == ["Python", "uvloop", "pyarrow"]
    assert "Prometheus" in names
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["Python"]["ok"] and by_name["uvloop"]["ok"] and by_name["loopback"]["ok"]


def test_what_is_missing_comes_with_its_mend(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/absent")
    monkeypatch.setattr(doctor, "MEMORY_BYTES", 1 << 60)
    result = run("doctor")
    assert result.exit_code == 1
    assert "apt-get install prometheus" in result.stdout
    assert "--network-memory-bytes" in result.stdout


def test_an_optional_gap_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(doctor, "DEFAULT_PORT", server.getsockname()[1])
        check = doctor._port(doctor.DEFAULT_PORT, "--port")
    assert not check.ok
    assert not check.needed
    assert "pid" in check.found
