"""Settings by layer, the state directory, and the secret's file."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from minishuffle import config, limits
from minishuffle.config import (
    ClusterSettings,
    CoordinatorFinder,
    CoordinatorPlace,
    TlsFiles,
    create_secret,
    default_secret_file,
    default_state_dir,
    forget_coordinator,
    hash_seed,
    load_settings,
    read_coordinator,
    read_secret,
    tls_files_of,
    write_coordinator,
)
from minishuffle.errors import UnknownName, UsageError
from minishuffle.ids import Address


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MINISHUFFLE_"):
            monkeypatch.delenv(name)


def test_each_layer_covers_the_one_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load_settings(), ClusterSettings)
    assert load_settings().segment_bytes == limits.SEGMENT_BYTES_DEFAULT
    toml = tmp_path / "settings.toml"
    toml.write_text("slots = 3\nping_interval = 1.5\nheartbeat_interval = 0.25\n")
    assert (load_settings(toml).slots, load_settings(toml).ping_interval) == (3, 1.5)
    monkeypatch.setenv("MINISHUFFLE_SLOTS", "4")
    monkeypatch.setenv("MINISHUFFLE_PING_INTERVAL", "2.5")
    assert (load_settings(toml).slots, load_settings(toml).ping_interval) == (4, 2.5)
    settings = load_settings(toml, slots=5, ping_interval=None)
    assert (settings.slots, settings.ping_interval, settings.heartbeat_interval) == (5, 2.5, 0.25)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"slots": 0}, "slots"),
        ({"segment_bytes": limits.SEGMENT_BYTES_MIN - 1}, "segment_bytes"),
        ({"segment_bytes": limits.SEGMENT_BYTES_MAX + 1}, "segment_bytes"),
        ({"switch_interval": 0}, "switch_interval"),
        ({"slots": "many"}, "slots"),
        ({"heartbeat_interval": 4.0, "heartbeat_timeout": 11.0}, "three times"),
    ],
)
def test_values_that_do_not_fit_are_named(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        load_settings(**flags)


def test_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml does not exist"):
        load_settings(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("slotz = 4", "there is no setting 'slotz'; did you mean 'slots'\\?"),
        ("Slots = 4", "there is no setting 'Slots'; did you mean 'slots'\\?"),
        ("[a]\nslots = 1", "there is no setting 'a'; the settings are abandoned_max, "),
    ],
)
def test_names_in_the_file_that_are_no_settings_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    toml = tmp_path / "settings.toml"
    toml.write_text(text)
    with pytest.raises(UnknownName, match=rf"settings\.toml: {problem}"):
        load_settings(toml)


@pytest.mark.parametrize("content", [b"slots 4", b"slots = \xff", b"slots = 1\nslots = 2"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    toml = tmp_path / "settings.toml"
    toml.write_bytes(content)
    with pytest.raises(UsageError, match=r"settings file .*settings\.toml cannot be read: ."):
        load_settings(toml)


@pytest.mark.parametrize("variable", ["MINISHUFFLE_SLOTZ", "minishuffle_slot"])
def test_slips_in_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "4")
    with pytest.raises(UnknownName, match=f"{variable}: .*did you mean MINISHUFFLE_SLOTS\\?"):
        load_settings()


def test_other_names_in_the_environment_are_somebody_elses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINISHUFFLE_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("MINISHUFFLE_STATE_DIR", "/state")
    monkeypatch.setenv("MINISHUFFLE_SOAK", "0")
    monkeypatch.setenv("MINISHUFFLE_SEED", "1")
    monkeypatch.setenv("minishuffle_ping_interval", "2.5")
    assert load_settings().ping_interval == 2.5
    assert not caplog.records
    monkeypatch.setenv("MINISHUFFLE_SERVICE_HOST", "10.0.0.1")
    assert load_settings().slots == 2
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable MINISHUFFLE_SERVICE_HOST is ignored: there is no such setting"
    ]


def test_a_keyword_that_is_no_setting_is_refused() -> None:
    with pytest.raises(ValidationError, match="slotz"):
        load_settings(slotz=4)


def test_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert default_state_dir("blue") == Path("/var/state/minishuffle/blue")
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
        assert default_state_dir("blue") == Path("/home/somebody/.local/state/minishuffle/blue")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_state_dir("blue") == Path("/home/somebody/.local/state/minishuffle/blue")
    assert default_secret_file(Path("/state")) == Path("/state/secret")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b"])
def test_cluster_name_stays_inside_the_state_directory(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a cluster"):
        default_state_dir(name)


def test_secret_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "minishuffle" / "blue" / "secret"
    before = os.umask(0)
    try:
        secret = create_secret(path)
    finally:
        os.umask(before)
    assert len(bytes.fromhex(secret.decode())) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_secret(path) == secret
    assert create_secret(tmp_path / "other") != secret


def test_secret_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = create_secret(path)
    with pytest.raises(UsageError, match=f"there is a secret at {path} already"):
        create_secret(path)
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="already"):
        create_secret(dangling)
    assert read_secret(path) == secret
    assert not (tmp_path / "target").exists()


def test_secret_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write a secret to .*--secret-file"):
        create_secret(tmp_path / "file" / "secret")


def test_secret_may_be_the_users_own_text(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  correct horse battery staple and so on\n")
    path.chmod(0o400)
    assert read_secret(path) == b"correct horse battery staple and so on"


@pytest.mark.parametrize("size", [0, 1, 31])
def test_secret_that_can_be_guessed_is_refused_with_the_command_that_replaces_it(
    tmp_path: Path, size: int
) -> None:
    path = tmp_path / "a secret"
    path.touch(mode=0o600)
    path.write_bytes(b"  " + b"s" * size + b"\n")
    with pytest.raises(UsageError, match=f"the secret at {path} has {size} characters, and a sho") as refused:
        read_secret(path)
    command = str(refused.value).partition("replace it with '")[2].partition("', give it")[0]
    assert command == f"(umask 077; openssl rand -hex 32 > '{path}')"
    path.unlink()
    subprocess.run(command, shell=True, check=True, timeout=30)
    assert len(read_secret(path)) == 64
    path.write_bytes(b"s" * 32)
    assert read_secret(path) == b"s" * 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o602])
def test_secret_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    create_secret(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=rf"\(mode {mode:04o}\); chmod 600 {path}"):
        read_secret(path)


def test_secret_that_is_missing_or_no_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(UsageError, match=f"there is no secret at {path}.*--secret-file"):
        read_secret(path)
    with pytest.raises(UsageError, match=f"cannot read the secret at {tmp_path}"):
        read_secret(tmp_path)


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    unset = default_state_dir("blue")
    assert unset == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local/state/minishuffle/blue"
    monkeypatch.setenv("HOME", "")
    assert default_state_dir("blue") == unset


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(f"uid not found: {user}")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(
        UsageError, match="no home directory .*: set XDG_STATE_HOME or HOME, or .* --state-dir"
    ):
        default_state_dir("blue")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_state_dir("blue") == Path("/state/minishuffle/blue")


def test_a_file_is_read_once_until_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def read(path: Path) -> CoordinatorPlace | None:
        reads.append(path)
        return read_coordinator(path)

    monkeypatch.setattr(config, "read_coordinator", read)
    find = CoordinatorFinder(tmp_path)
    assert find() is None
    for term in (1, 2):
        place = CoordinatorPlace(Address("127.0.0.1", 80), term)
        write_coordinator(tmp_path, place)
        assert find() == find() == place
    assert len(reads) == 2
    forget_coordinator(tmp_path, 2)
    assert find() is None


def test_the_last_coordinator_is_found_and_forgets_only_itself(tmp_path: Path) -> None:
    assert read_coordinator(tmp_path) is None
    first, second = (CoordinatorPlace(Address("127.0.0.1", 80 + term), term) for term in (1, 2))
    write_coordinator(tmp_path, first)
    write_coordinator(tmp_path, second)
    forget_coordinator(tmp_path, 1)
    assert read_coordinator(tmp_path) == second
    write_coordinator(tmp_path, second._replace(handed_over=True))
    assert read_coordinator(tmp_path) == (second.address, 2, True, None, "")
    files = TlsFiles("/certificate", "/key", "/ca")
    write_coordinator(tmp_path, second._replace(tls=files, snapshot_dir="/snapshots"))
    assert read_coordinator(tmp_path) == (second.address, 2, False, files, "/snapshots")
    nothing = (None, None, None)
    assert tls_files_of(nothing, tmp_path) == tls_files_of(nothing, tmp_path, second.address) == files
    assert tls_files_of(nothing, tmp_path, first.address) is None
    assert tls_files_of(("", "", ""), tmp_path) is None
    assert tls_files_of(("a", "b", "c"), tmp_path) == TlsFiles("a", "b", "c")
    with pytest.raises(UsageError, match="go together: give --tls-key, --tls-ca, too"):
        tls_files_of(("a", None, ""), tmp_path)
    forget_coordinator(tmp_path, 2)
    assert read_coordinator(tmp_path) is None
    with pytest.raises(UsageError, match="cannot write .*coordinator.json.*--state-dir"):
        write_coordinator(tmp_path / "missing", first)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"coordinator": "nowhere", "term": 1}', '{"term": 1}'])
def test_a_file_that_says_nothing_of_a_coordinator_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "coordinator.json").write_text(text)
    assert read_coordinator(tmp_path) is None


def test_the_files_of_tls_go_together() -> None:
    with pytest.raises(ValidationError, match="tls_certificate, tls_key and tls_ca go together"):
        load_settings(None, tls_certificate="a", tls_ca="c")
    assert load_settings(None).tls_files is None
    assert load_settings(None, tls_certificate="a", tls_key="b", tls_ca="c").tls_files == ("a", "b", "c")


@pytest.mark.parametrize("value", ["nan", "0.3"])
def test_a_host_timeout_that_is_too_short_or_no_number_is_refused(value: str) -> None:
    with pytest.raises(ValidationError, match=rf"host_timeout \({value} s\) must be at least 0.4 s, or off"):
        load_settings(None, host_timeout=value)
    assert load_settings(None, host_timeout="off").host_timeout == "off"


def test_python_hashes_as_the_secret_says() -> None:
    seeds = {hash_seed(secret) for secret in (b"a" * 32, b"b" * 32)}
    assert len(seeds) == 2 and all(0 <= int(seed) < 1 << 32 for seed in seeds)
    assert hash_seed(b"a" * 32) in seeds
