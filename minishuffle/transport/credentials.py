"""The certificate, key and CA of a process for TLS, and the checks of these and of a peer's.

Connections between processes are mutual. Each side shows a certificate that ``tls_ca`` has signed, and the
dialed side's must be for the dialed address. All connections use TLS 1.3, by Python's ``ssl``. The files are
checked for each new connection, and read again when they have changed; existing connections stay.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from minishuffle.config import ClusterSettings, TlsFiles
from minishuffle.errors import UsageError
from minishuffle.wire.advertised import is_wildcard
from minishuffle.wire.handshake import tls_on_one_side

__all__ = ["Credentials", "TlsContexts", "tls_problem"]

_log = logging.getLogger(__name__)

_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_CA_FIX: Final = "give all processes of the cluster certificates of one CA, and that CA as tls_ca"
_OTHER_CA: Final = f"is of another CA than that in tls_ca: {_CA_FIX}"
_OTHER_NAME: Final = (
    "is not for {host}, by which it is reached: name that in the certificate (subjectAltName), or have it "
    "reached by a name that the certificate has (--host, --advertise, --coordinator)"
)
_VERDICTS: Final = {
    2: _OTHER_CA,
    7: _OTHER_CA,
    9: "is not valid yet: set the clocks of the hosts right, or renew it",
    10: "has expired: renew it",
    18: _OTHER_CA,
    19: _OTHER_CA,
    20: _OTHER_CA,
    21: _OTHER_CA,
    26: "is not for this use: its extendedKeyUsage needs both serverAuth and clientAuth",
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
"""Problems of a certificate in words, by OpenSSL's ``X509_V_ERR_…``."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
"""OpenSSL's reasons for an answer that is not TLS; they depend on its version."""
_ALERTS: Final = {
    "CERTIFICATE_EXPIRED": "has expired, says the other side: renew it, or set the clocks of the hosts right",
    "UNKNOWN_CA": f"is of another CA than that in tls_ca of the other side: {_CA_FIX}",
    "UNSUPPORTED_CERTIFICATE": (
        "is not for this use, says the other side: its extendedKeyUsage needs both serverAuth and clientAuth"
    ),
    "BAD_CERTIFICATE": (
        "is not taken by the other side: it may be for another address than the one that was dialed"
    ),
    "CERTIFICATE_REQUIRED": "is missing: set tls_certificate, tls_key and tls_ca",
}
"""Problems that a peer has with this side's certificate, by the end of the alert's name."""


def tls_problem(error: ssl.SSLError, host: str = "") -> str:
    """Why TLS with a peer failed, and the fix; ``host`` is the address that was dialed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        verdict = _VERDICTS.get(error.verify_code)
        if verdict is None:
            return f"the certificate of the other side is not accepted: {error.verify_message}"
        return f"the certificate of the other side {verdict.format(host=host)}"
    reason = error.reason or str(error)
    if reason in _NO_TLS:
        return str(tls_on_one_side(dialed=False))
    for alert, verdict in _ALERTS.items():
        if reason.endswith(alert):
            return f"the certificate of this side {verdict}"
    if reason.endswith(("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW")):
        return "the other side does not speak TLS 1.3, and this side nothing else"
    return f"TLS failed: {reason.replace('_', ' ').lower()}"


class Pems(NamedTuple):
    """The contents of the files."""

    certificate: bytes
    """With those of the CAs between it and ``ca``, if any."""
    key: bytes
    ca: bytes
    """One or more."""


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """The contexts made from one reading of the files; a connection keeps the ones it began with."""

    pems: Pems
    accepting: ssl.SSLContext
    """For the side that is dialed; wants a certificate."""
    dialing: ssl.SSLContext
    web: ssl.SSLContext
    """For an HTTP server."""
    fingerprint: bytes
    """SHA-256 of this side's certificate."""


class Credentials:
    """The files of one process; pickled with their contents.

    Args:
        files: are read at once, and again when they have changed.
        web_certificates: an HTTP server asks its clients for certificates.

    Raises:
        UsageError: the problem of the files, and the fix.
    """

    def __init__(self, files: TlsFiles, *, web_certificates: bool = False) -> None:
        self._files: TlsFiles | None = files
        self._web_certificates = web_certificates
        self._seen = _signature(files)
        self._contexts = _made(_read(files), files, web_certificates)

    @classmethod
    def of(cls, settings: ClusterSettings) -> Credentials | None:
        """The credentials of the settings; None: no TLS.

        Raises:
            UsageError: the problem of the files, and the fix.
        """
        files, web_certificates = settings.tls_files, settings.tls_http_clients == "certificate"
        if files is not None:
            return cls(files, web_certificates=web_certificates)
        if web_certificates:
            raise UsageError(
                "tls_http_clients is certificate, and there is no TLS: set tls_certificate, tls_key and "
                "tls_ca, too"
            )
        return None

    def __getstate__(self) -> tuple[Pems, bool]:
        return self.current().pems, self._web_certificates

    def __setstate__(self, state: tuple[Pems, bool]) -> None:
        pems, self._web_certificates = state
        self._files, self._seen = None, ()
        self._contexts = _made(pems, TlsFiles("its certificate", "its key", "its CA"), self._web_certificates)

    @property
    def files(self) -> TlsFiles | None:
        """None in a process that got them as a pickle."""
        return self._files

    def current(self) -> TlsContexts:
        """For a new connection. Files that have changed and cannot be used are logged, once, and what they
        had before goes on to be used."""
        files = self._files
        if files is not None and (signature := _signature(files)) != self._seen:
            self._seen = signature
            try:
                self._contexts = _made(_read(files), files, self._web_certificates)
                _log.warning("%s was read again, for new connections", files.certificate)
            except UsageError as error:
                _log.warning("TLS goes on with what was read before: %s", error)
        return self._contexts

    def check_host(self, host: str) -> None:
        """Raises UsageError: nobody who dials that address would accept the certificate."""
        if is_wildcard(host):
            return
        contexts = self._contexts
        try:
            _try_out(contexts, host)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code not in (62, 64):
                raise
            name = self._files.certificate if self._files is not None else "TLS"
            raise UsageError(
                f"{name} is a certificate for {_names(contexts)} and not for {host}, by which this process "
                "is reached: name that in it (subjectAltName), or choose another address with --host or "
                "--advertise"
            ) from None


def _signature(files: TlsFiles) -> tuple[Any, ...]:
    """Differs when one of the files has changed."""
    found: list[Any] = []
    for each in files:
        try:
            status = os.stat(each)
        except OSError as error:
            found.append(error.errno)
        else:
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _read(files: TlsFiles) -> Pems:
    """Read the files. Raises UsageError: one cannot be read, or all users may read the key."""
    contents: list[bytes] = []
    for setting, path in zip(TlsFiles._fields, files, strict=True):
        try:
            with open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                contents.append(file.read())
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror}; name another file with --tls-{setting}"
            ) from None
        if setting == "key" and mode & 0o077:
            raise UsageError(f"other users may read the key at {path} (mode {mode:04o}); chmod 600 {path}")
    return Pems(*contents)


def _made(pems: Pems, files: TlsFiles, web_certificates: bool) -> TlsContexts:
    """Raises UsageError: these do not belong together, or nobody would accept them; ``files`` are their
    names."""
    found = _CERTIFICATE.search(pems.certificate)
    if found is None:
        raise UsageError(f"{files.certificate} holds no certificate: tls_certificate is a PEM file with one")
    accepting, dialing = _context(pems, files, server=True), _context(pems, files, server=False)
    web = _context(pems, files, server=True)
    web.verify_mode = ssl.CERT_OPTIONAL if web_certificates else ssl.CERT_NONE
    der = ssl.PEM_cert_to_DER_cert(found[0].decode())
    contexts = TlsContexts(pems, accepting, dialing, web, hashlib.sha256(der).digest())
    try:
        _try_out(contexts)
    except ssl.SSLCertVerificationError as error:
        verdict = _VERDICTS.get(error.verify_code, f"is not accepted: {error.verify_message}")
        raise UsageError(f"the certificate in {files.certificate} {verdict}") from None
    except ssl.SSLError as error:
        raise UsageError(f"the certificate in {files.certificate} cannot be used: {_reason(error)}") from None
    return contexts


def _context(pems: Pems, files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False
    if server:
        context.num_tickets = (
            0  # Each connection shows its certificates: none goes on with another's session.
        )
    try:
        with _in_memory(pems.ca) as ca:
            context.load_verify_locations(ca)
    except ssl.SSLError:
        raise UsageError(
            f"{files.ca} holds no certificate: tls_ca is a PEM file with that of the CA"
        ) from None

    def ask() -> str:
        raise UsageError(
            f"the key in {files.key} has a passphrase, which nobody is there to type: take it off with "
            f"'openssl pkey -in {files.key}'"
        )

    try:
        with _in_memory(pems.certificate) as certificate, _in_memory(pems.key) as key:
            context.load_cert_chain(certificate, key, password=ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"the key in {files.key} is not that of the certificate in {files.certificate}: give two "
                "that were made together"
            ) from None
        raise UsageError(
            f"{files.certificate} and {files.key} cannot be used ({_reason(error)}): tls_certificate is a "
            "PEM file with a certificate, and tls_key one with its private key"
        ) from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A file in memory with the content, since ``ssl`` reads only files: so the checked contents are the used
    ones."""
    with open(os.memfd_create("tls"), "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{file.fileno()}"


def _try_out(contexts: TlsContexts, host: str | None = None) -> dict[str, Any]:
    """Try a TLS handshake in memory, as another process of the cluster would make it with this one.

    Args:
        host: the dialed host; None for any.

    Returns:
        The contents of the certificate.

    Raises:
        ssl.SSLError: one side would not accept the other.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialing = contexts.dialing
    dialing.check_hostname = host is not None
    try:
        ends = [
            dialing.wrap_bio(back, there, server_hostname=host),
            contexts.accepting.wrap_bio(there, back, server_side=True),
        ]
    finally:
        dialing.check_hostname = True
    waiting = True
    while waiting:
        waiting = False
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting = True
    return ends[0].getpeercert() or {}


def _names(contexts: TlsContexts) -> str:
    found = _try_out(contexts).get("subjectAltName", ())
    return ", ".join(name for _, name in found) or "no name at all"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
