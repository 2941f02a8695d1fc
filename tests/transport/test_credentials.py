"""Files for TLS: which are refused, with what to do about it, and when they are read again."""

from __future__ import annotations

import os
import pickle
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from minishuffle.config import ClusterSettings, TlsFiles
from minishuffle.errors import UsageError
from minishuffle.transport.credentials import Credentials, tls_problem
from support.certificates import credentials, files_of

DAMAGED = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
Spoil = Callable[[TlsFiles], TlsFiles]


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """Good ones, for this test alone."""
    return copied("good", tmp_path)


def copied(kind: str, directory: Path) -> TlsFiles:
    return TlsFiles(*(str(shutil.copy(file, directory / Path(file).name)) for file in files_of(kind)))


def locked(files: TlsFiles) -> TlsFiles:
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"open sesame")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    Path(files.key).write_bytes(pem)
    return files


def written(name: str, text: str) -> Spoil:
    def spoil(files: TlsFiles) -> TlsFiles:
        Path(getattr(files, name)).write_text(text)
        return files

    return spoil


def open_to_all(files: TlsFiles) -> TlsFiles:
    os.chmod(files.key, 0o644)
    return files


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda f: f._replace(key="/nowhere/k"), "cannot read /nowhere/k: No such.*file with --tls-key"),
        (lambda f: f._replace(certificate="/"), "cannot read /: Is a direc.*--tls-certificate"),
        (open_to_all, r"other users may read the key at (.*) \(mode 0644\); chmod 600 \1"),
        (written("certificate", "none"), "holds no certificate: tls_certificate is a PEM file"),
        (written("certificate", DAMAGED), "certificate.pem and .*key.pem cannot be used"),
        (written("key", "none"), r"key.pem cannot be used \(.*\): .* tls_key one with its private key"),
        (written("ca", "none"), "ca.pem holds no certificate: tls_ca is a PEM file with that of the CA"),
        (locked, "key.pem has a passphrase, .* off with 'openssl pkey -in"),
        (lambda f: f._replace(key=files_of("another").key), "is not that of .* made together"),
        (lambda f: f._replace(ca=files_of("stranger").ca), "pem is of another CA than that in tls_ca"),
        (lambda f: files_of("expired"), "certificate.pem has expired: renew it"),
        (lambda f: files_of("too early"), "pem is not valid yet: set the clocks of the hosts"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_one_clear_error(files: TlsFiles, spoil: Spoil, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as raised:
        Credentials(spoil(files))
    assert "\n" not in str(raised.value)


def test_settings_name_the_files(files: TlsFiles) -> None:
    named = {f"tls_{name}": path for name, path in files._asdict().items()}
    made = Credentials.of(ClusterSettings(**named))
    assert made is not None and made.files == files
    assert made.current().web.verify_mode == ssl.CERT_NONE
    strict = Credentials.of(ClusterSettings(**named, tls_http_clients="certificate"))
    assert strict is not None and strict.current().web.verify_mode == ssl.CERT_OPTIONAL
    assert Credentials.of(ClusterSettings()) is None
    with pytest.raises(
        UsageError, match="tls_http_clients is certificate, and there is no TLS: set tls_cert"
    ):
        Credentials.of(ClusterSettings(tls_http_clients="certificate"))


def test_all_is_tls_1_3_and_mutual() -> None:
    contexts = credentials().current()
    for context in (contexts.accepting, contexts.dialing, contexts.web):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert contexts.accepting.verify_mode == contexts.dialing.verify_mode == ssl.CERT_REQUIRED
    assert contexts.dialing.check_hostname


def test_a_certificate_has_to_be_for_the_address_that_others_use() -> None:
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "::", ""):
        credentials().check_host(host)
    with pytest.raises(
        UsageError, match="a certificate for elsewhere.example and not for 127.0.0.1, by which"
    ):
        credentials("foreign name").check_host("127.0.0.1")


def test_files_that_change_are_read_again(
    files: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Credentials(files)
    first = made.current()
    assert made.current() is first
    (tmp_path / "new").mkdir()
    new = copied("another", tmp_path / "new")
    os.replace(new.certificate, files.certificate)
    assert made.current() is first, "the key is that of the certificate before"
    assert made.current() is first
    assert caplog.text.count("TLS goes on with what was read before: the key in ") == 1
    os.replace(new.key, files.key)
    second = made.current()
    assert second.fingerprint == credentials("another").current().fingerprint != first.fingerprint
    assert f"{files.certificate} was read again" in caplog.text
    os.unlink(files.key)
    assert made.current() is second


def test_as_a_pickle_they_are_good_without_the_files(files: TlsFiles) -> None:
    packed = pickle.dumps(Credentials(files))
    for file in files:
        os.unlink(file)
    there = pickle.loads(packed)
    assert there.files is None
    assert there.current().fingerprint == credentials().current().fingerprint


def error_of(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


def verdict_of(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "something else"
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (verdict_of(10), "the certificate of the other side has expired: renew it"),
        (verdict_of(18), "the certificate of the other side is of another CA than that in tls_ca: give"),
        (verdict_of(64), "the certificate of the other side is not for 10.0.0.1, by which it is reached:"),
        (verdict_of(26), "the certificate of the other side is not for this use: its extendedKeyUsage needs"),
        (verdict_of(99), "the certificate of the other side is not accepted: something else"),
        (error_of("SSLV3_ALERT_CERTIFICATE_EXPIRED"), "the certificate of this side has expired, says"),
        (error_of("TLSV1_ALERT_UNKNOWN_CA"), "the certificate of this side is of another CA than that in"),
        (error_of("SSLV3_ALERT_BAD_CERTIFICATE"), "the certificate of this side is not taken by the"),
        (error_of("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "the certificate of this side is missing: set"),
        (error_of("WRONG_VERSION_NUMBER"), "the side that dialed uses TLS, and the side that was dialed"),
        (error_of("TLSV1_ALERT_PROTOCOL_VERSION"), "the other side does not speak TLS 1.3, and this"),
        (error_of("BAD_RECORD_MAC"), "TLS failed: bad record mac"),
    ],
)  # fmt: skip
def test_each_failure_has_its_words(error: ssl.SSLError, text: str) -> None:
    assert tls_problem(error, "10.0.0.1").startswith(text)
