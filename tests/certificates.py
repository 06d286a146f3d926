"""A certificate authority for tests, and certificates of it, made by the openssl command."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

_TIMEOUT_S = 60.0
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_LIFE = ("-days", "2")


@dataclass(frozen=True)
class Certificate:
    """Files of one process."""

    certificate: Path
    key: Path
    authorities: Path

    @property
    def settings(self) -> dict[str, Path]:
        """As `ServiceSettings` names them."""
        return {"tls_cert_file": self.certificate, "tls_key_file": self.key, "tls_ca_file": self.authorities}


@dataclass(frozen=True)
class Authority:
    """Signs certificates for 127.0.0.1 and localhost."""

    directory: Path

    @property
    def certificate(self) -> Path:
        return self.directory / "authority.pem"

    @classmethod
    def make(cls, directory: Path) -> Self:
        """A new one; skips the test where there is no openssl (in CI: fails it)."""
        if shutil.which("openssl") is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)("no openssl command")
        authority = cls(directory)
        key = directory / "authority.key"
        out = ("-keyout", key, "-out", authority.certificate)
        _openssl("req", "-x509", *_NEW_KEY, *_LIFE, "-subj", "/CN=Test authority", *out)
        return authority

    def issue(self, name: str) -> Certificate:
        """A key and a certificate that serves both ends of a call."""
        key, request, certificate = (self.directory / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n"
        )
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        signer = ("-CA", self.certificate, "-CAkey", self.directory / "authority.key", "-CAcreateserial")
        _openssl("x509", "-req", *_LIFE, "-in", request, *signer, "-extfile", extensions, "-out", certificate)
        key.chmod(0o600)
        return Certificate(certificate, key, self.certificate)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=_TIMEOUT_S)
