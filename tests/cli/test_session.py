import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from minishuffle.cli.main import CommandLine, cli
from minishuffle.cli.session import (
    Session,
    late_global_options,
    print_json,
    session_of,
    settings_from,
    settings_options,
)
from minishuffle.config import CoordinatorPlace, TlsFiles, write_coordinator
from minishuffle.errors import UsageError
from minishuffle.ids import Address

Run = Callable[..., Result]


@click.command()
@settings_options
@late_global_options
@click.pass_context
def probe(context: click.Context, **values: object) -> None:
    session = session_of(context)
    settings = settings_from(values)
    click.echo(
        json.dumps(
            {
                "coordinator": session.coordinator,
                "cluster": session.cluster,
                "state_dir": str(session.directory()),
                "secret_file": str(session.secret_path()),
                "debug": session.debug,
                "verbose": session.verbose,
                "slots": settings.slots,
                "tls": settings.tls_files,
                "uvloop": settings.use_uvloop,
            }
        )
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(CommandLine, "get_command", lambda self, ctx, name: probe)

    def invoke(*arguments: str, **env: str) -> dict[str, object]:
        result: Result = CliRunner().invoke(cli, arguments, env=env)
        assert result.exit_code == 0, result.output
        found: dict[str, object] = json.loads(result.stdout)
        return found

    return invoke


def test_late_global_options_stand_before_or_after_the_command(seen) -> None:  # type: ignore[no-untyped-def]
    before = seen("--coordinator", "a:1", "--cluster", "blue", "--debug", "-vv", "doctor")
    after = seen("doctor", "--coordinator", "a:1", "--cluster", "blue", "--debug", "-vv")
    assert before == after
    del before["state_dir"], before["secret_file"], before["tls"]
    assert before == {
        "coordinator": "a:1",
        "cluster": "blue",
        "debug": True,
        "verbose": 2,
        "slots": 2,
        "uvloop": True,
    }


@pytest.mark.parametrize("name", ["coordinator", "cluster", "state_dir", "secret_file"])
def test_where_the_cluster_is_comes_from_the_environment_and_a_flag_wins(seen, name: str) -> None:  # type: ignore[no-untyped-def]
    environment = {f"MINISHUFFLE_{name.upper()}": "env:1"}
    assert seen("doctor", **environment)[name] == "env:1"
    flag = [f"--{name.replace('_', '-')}", "flag:1"]
    for arguments in ([*flag, "doctor"], ["doctor", *flag]):
        assert seen(*arguments, **environment)[name] == "flag:1"


def test_settings_come_from_file_environment_and_flags(seen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    toml = tmp_path / "settings.toml"
    toml.write_text("slots = 3\nuse_uvloop = false\n")
    assert seen("doctor", "--config", str(toml)) | {"slots": 3, "uvloop": False} == seen(
        "doctor", "--config", str(toml)
    )
    assert seen("doctor", "--config", str(toml), MINISHUFFLE_SLOTS="4")["slots"] == 4
    assert seen("doctor", "--config", str(toml), "--slots", "5", MINISHUFFLE_SLOTS="4")["slots"] == 5
    assert seen("doctor", "--no-use-uvloop")["uvloop"] is False


@pytest.mark.parametrize("under", ["", "state"])
def test_a_state_directory_that_cannot_be_made_is_named_with_the_option(
    run: Run, tmp_path: Path, under: str
) -> None:
    """Where a file is in the way."""
    file = tmp_path / "file"
    file.touch()
    path = file / under
    result = run("cluster", "up", "--state-dir", str(path), "--port", "0")
    assert result.exit_code == 2
    assert f"cannot make the state directory {path}: " in result.stderr
    assert result.stderr.endswith("; name another with --state-dir\n")
    assert len(result.stderr.splitlines()) == 1


def test_a_state_directory_that_cannot_be_written_is_named_with_the_option(run: Run, tmp_path: Path) -> None:
    (tmp_path / "coordinator.out").mkdir()
    result = run("cluster", "up", "--state-dir", str(tmp_path), "--port", "0")
    assert result.exit_code == 2
    assert f"cannot write {tmp_path / 'coordinator.out'}: Is a directory; " in result.stderr
    assert result.stderr.endswith("; name another state directory with --state-dir\n")
    assert len(result.stderr.splitlines()) == 1


def test_a_record_that_cannot_be_read_is_named_with_the_option(run: Run, tmp_path: Path) -> None:
    result = run("cluster", "status", "--state-dir", str(tmp_path / ("a" * 300)))
    assert result.exit_code == 2
    assert "cluster.json: File name too long; name another state directory with --state-dir" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_state_directory_follows_the_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Session(cluster="blue").directory() == tmp_path / "state" / "minishuffle" / "blue"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert Session().directory() == Path.home() / ".local" / "state" / "minishuffle" / "default"
    assert Session(state_dir=tmp_path).directory() == tmp_path


def test_the_address_is_the_flag_then_the_record_then_the_default(tmp_path: Path) -> None:
    session = Session(state_dir=tmp_path)
    assert str(session.address()) == "127.0.0.1:8471"
    session.record_path().write_text('{"coordinator": "127.0.0.1:9000"}')
    assert str(session.address()) == "127.0.0.1:9000"
    session.coordinator = "10.0.0.1:1"
    assert str(session.address()) == "10.0.0.1:1"


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    session = Session(state_dir=tmp_path)
    session.record_path().write_text(text)
    with pytest.raises(UsageError, match=r"cluster\.json is .*remove it"):
        session.address()


def test_a_missing_secret_names_the_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no secret at .*cluster up.*--secret-file"):
        Session(state_dir=tmp_path).secret()


def test_files_for_tls_are_those_given_or_those_of_the_coordinator_that_was_started_here(
    tmp_path: Path,
) -> None:
    session, files = Session(state_dir=tmp_path), TlsFiles("/c", "/k", "/a")
    assert session.tls_files() is None and session.credentials() is None
    write_coordinator(tmp_path, CoordinatorPlace(Address("10.0.0.1", 80), 1, tls=files))
    assert session.tls_files() == files
    with pytest.raises(UsageError, match="cannot read /c: No such file or directory; name another file with"):
        session.credentials()
    assert Session(state_dir=tmp_path, coordinator="10.0.0.1:81").tls_files() is None
    assert Session(state_dir=tmp_path, tls_certificate="", tls_key="", tls_ca="").tls_files() is None
    given = Session(state_dir=tmp_path, tls_certificate="c", tls_key="k", tls_ca="a")
    assert given.tls_files() == ("c", "k", "a")
    assert given.flags().endswith(" --tls-certificate c --tls-key k --tls-ca a")


def test_files_for_tls_are_settings_wherever_they_stand(seen) -> None:  # type: ignore[no-untyped-def]
    flags = ("--tls-certificate", "c", "--tls-key", "k", "--tls-ca", "a")
    environment = {"MINISHUFFLE_TLS_CERTIFICATE": "x", "MINISHUFFLE_TLS_KEY": "y", "MINISHUFFLE_TLS_CA": "z"}
    assert seen("doctor")["tls"] is None
    assert seen("doctor", **environment)["tls"] == ["x", "y", "z"]
    assert seen("doctor", *flags)["tls"] == seen(*flags, "doctor", **environment)["tls"] == ["c", "k", "a"]
    nothing = [word if word.startswith("--") else "" for word in flags]
    assert seen("doctor", *nothing, **environment)["tls"] is None


def test_flags_find_the_same_cluster_again(tmp_path: Path) -> None:
    assert Session().flags() == ""
    assert Session(cluster="a b", state_dir=Path("/x")).flags() == " --state-dir /x --cluster 'a b'"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.5, float("nan"), (float("inf"), -float("inf"))], "[1.5, null, [null, null]]"),
        ({"a": {("x", 1): {2: float("nan")}}}, """{"a": {"('x', 1)": {"2": null}}}"""),
        ({None: 1, True: 2, 0.5: 3, float("nan"): 4}, '{"null": 1, "true": 2, "0.5": 3, "nan": 4}'),
        ([date(2024, 2, 29), b"\x00", {3}], '["2024-02-29", "b\'\\\\x00\'", "{3}"]'),
    ],
)
def test_json_is_json_whatever_the_rows_hold(
    capsys: pytest.CaptureFixture[str], value: Any, text: str
) -> None:
    def never(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    print_json(value)
    printed = capsys.readouterr().out
    assert printed == f"{text}\n"
    json.loads(printed, parse_constant=never)


@pytest.mark.parametrize("given", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    "command",
    [
        ["drill", "--every"],
        ["bench", "recovery", "--rate"],
        ["bench", "latency", "--rate"],
        ["trace", "j1", "--seconds"],
        ["worker", "drain", "1", "--timeout"],
    ],
    ids=" ".join,
)
def test_numbers_of_options_are_finite(command: list[str], given: str) -> None:
    found = CliRunner().invoke(cli, [*command, given])
    assert found.exit_code == 2
    assert "is not a finite number" in found.output or "is not in the range" in found.output
