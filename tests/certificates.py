"""A certificate authority for tests, and certificates like those of the openssl command."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY = timedelta(days=2)
MAX_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class Certificate:
    """Files of one process."""

    certificate: Path
    key: Path
    authorities: Path

    @property
    def settings(self) -> dict[str, Path]:
        """The names in `ServiceSettings`."""
        return {"tls_cert_file": self.certificate, "tls_key_file": self.key, "tls_ca_file": self.authorities}


@dataclass(frozen=True)
class CertificateAuthority:
    """Signs certificates for 127.0.0.1 and localhost."""

    certificate: Path
    _name: x509.Name
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, directory: Path) -> Self:
        """Creates an authority; certificates go to `directory`."""
        key, name = ec.generate_private_key(ec.SECP256R1()), _named("Test authority")
        basic = x509.BasicConstraints(ca=True, path_length=None)
        own = (
            _certificate_builder(name, name, key, key)
            .add_extension(basic, critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        path = directory / "authority.pem"
        path.write_bytes(own.public_bytes(Encoding.PEM))
        return cls(path, name, key)

    def issue(self, name: str) -> Certificate:
        """Creates a key and a certificate for both ends of a call."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(IPv4Address("127.0.0.1")), x509.DNSName("localhost")]
        ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            _certificate_builder(_named(name), self._name, key, self._key)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(ends), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        files = Certificate(self._path(f"{name}.pem"), self._path(f"{name}.key"), self.certificate)
        files.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        files.key.chmod(0o600)
        return files

    def _path(self, file: str) -> Path:
        return self.certificate.with_name(file)


def encrypt_key(key: Path, locked: Path) -> None:
    """Writes the key of file `key` to `locked`, encrypted with a password."""
    pem = load_pem_private_key(key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    locked.write_bytes(pem)
    locked.chmod(0o600)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    """The keys of an authority sign certificates, the others messages."""
    no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False, **no
    )


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    """With the identifiers of both keys, which Python 3.13 demands (`ssl.VERIFY_X509_STRICT`)."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - MAX_CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
