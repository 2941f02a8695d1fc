"""The CA that a cluster makes for itself."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from minishuffle.authority import LOOPBACK, Authority, here, throw_away_files
from minishuffle.errors import UsageError
from minishuffle.transport.credentials import Credentials


def test_files_of_a_ca_that_is_thrown_away_are_good_for_this_machine(tmp_path: Path) -> None:
    files = throw_away_files(tmp_path, "10.1.2.3")
    assert {path.name for path in (tmp_path / "tls").iterdir()} == {"certificate.pem", "key.pem", "ca.pem"}
    assert all(stat.S_IMODE(Path(file).stat().st_mode) == 0o600 for file in files)
    made = Credentials(files)
    for host in ("10.1.2.3", *LOOPBACK):
        made.check_host(host)
    with pytest.raises(UsageError, match=r"for 10\.1\.2\.3, .*localhost.* and not for 10\.9\.9\.9"):
        made.check_host("10.9.9.9")
    first = made.current().pems.ca
    assert throw_away_files(tmp_path, "10.1.2.3") == files
    assert made.current().pems.ca != first


def test_a_ca_that_is_kept_certifies_again(tmp_path: Path) -> None:
    one = Authority.kept(tmp_path / "ca").issue(tmp_path / "one", ["node-1"])
    two = Authority.kept(tmp_path / "ca").issue(tmp_path / "two", ["node-2"])
    assert Path(one.ca).read_bytes() == Path(two.ca).read_bytes() == (tmp_path / "ca" / "ca.pem").read_bytes()
    assert stat.S_IMODE((tmp_path / "ca" / "ca-key.pem").stat().st_mode) == 0o600
    Credentials(two).check_host("node-2")


def test_what_is_no_ca_or_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    one = Authority.kept(tmp_path / "ca")
    (tmp_path / "ca" / "ca.pem").write_text("nothing")
    with pytest.raises(UsageError, match="the CA in .*/ca cannot be used: .*; remove it, or name another"):
        Authority.kept(tmp_path / "ca")
    with pytest.raises(
        UsageError, match="cannot write certificates to .*File exists; name another directory"
    ):
        one.issue(tmp_path / "ca" / "ca.pem", ["a"])
    with pytest.raises(UsageError, match="a certificate cannot be for that"):
        one.issue(tmp_path / "b", ["ä"])


def test_an_address_that_leads_nowhere_is_in_no_certificate() -> None:
    assert here("0.0.0.0", "10.0.0.1")[0] == "10.0.0.1"
