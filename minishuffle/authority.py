"""A CA of one's own, for a cluster that nobody gives certificates.

That of ``cluster up --tls`` and ``LocalCluster(tls=True)`` is thrown away: its key is on no disk, so that it
certifies nothing else.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minishuffle.config import TlsFiles
from minishuffle.errors import UsageError
from minishuffle.wire.advertised import is_wildcard

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName

__all__ = ["Authority", "here", "throw_away_files"]

VALID: Final = datetime.timedelta(days=365)
CLOCKS_APART: Final = datetime.timedelta(hours=1)
"""Other hosts may be behind."""
CA_FILE: Final = "ca.pem"
CA_KEY_FILE: Final = "ca-key.pem"
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class Authority:
    """A CA that can make certificates."""

    def __init__(self, certificate: Certificate, key: EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def new(cls) -> Authority:
        from cryptography import x509  # For weight.
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("minishuffle CA")
        builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(is_ca=True), True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return cls(_signed(builder.add_extension(identifier, False), key), key)

    @classmethod
    def kept(cls, directory: Path) -> Authority:
        """The CA in that directory; a new one is written there if there is none.

        Raises:
            UsageError: it cannot be read or written.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
        except FileNotFoundError:
            authority = cls.new()
            _write(
                directory, {CA_KEY_FILE: _private(authority._key), CA_FILE: _public(authority._certificate)}
            )
            return authority
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"the CA in {directory} cannot be used: {error}; remove it, or name another"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise UsageError(f"the CA in {directory} was not made by minishuffle: remove it, or name another")
        return cls(certificate, key)

    def issue(self, directory: Path, hosts: Sequence[str]) -> TlsFiles:
        """Write a certificate for these names and addresses, its key and the CA into that directory.

        Raises:
            UsageError: they cannot be written, or a host is no name.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        try:
            names = x509.SubjectAlternativeName([_general(host) for host in dict.fromkeys(hosts)])
        except ValueError as error:
            raise UsageError(f"a certificate cannot be for that: {error}") from None
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(_name("minishuffle"), self._certificate.subject, key)
        builder = builder.add_extension(names, False).add_extension(x509.ExtendedKeyUsage(uses), False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(is_ca=False), True).add_extension(issuer, False)
        # The key first: whoever looks for a certificate that has changed finds both.
        files = {"key.pem": _private(key), "certificate.pem": _public(_signed(builder, self._key))}
        _write(directory, {**files, CA_FILE: _public(self._certificate)})
        return TlsFiles(*(str(directory / name) for name in ("certificate.pem", "key.pem", CA_FILE)))


def throw_away_files(state_dir: Path, host: str) -> TlsFiles:
    """Files of a new CA for processes that listen on ``host`` of this machine.

    Raises:
        UsageError: they cannot be written.
    """
    return Authority.new().issue(state_dir / "tls", here(host))


def here(*hosts: str) -> list[str]:
    """These, as far as they lead somewhere, and the names by which this machine reaches itself."""
    found = [host for host in hosts if not is_wildcard(host)]
    if (name := socket.gethostname()).isascii() and name:
        found.append(name)
    return [*found, *LOOPBACK]


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Each is whole at any moment."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            new = directory / f"{name}.new"
            with suppress(FileNotFoundError):
                new.unlink()
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            new.replace(directory / name)
    except OSError as error:
        raise UsageError(
            f"cannot write certificates to {directory}: {error.strerror}; name another directory"
        ) from error


# --- what cryptography takes ----------------------------------------------------------------------


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(), now - CLOCKS_APART, now + VALID
    )


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> Certificate:
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())


def _public(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    pem: bytes = certificate.public_bytes(Encoding.PEM)
    return pem


def _private(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem
