"""Reads secret and certificates into a `ClusterTrust`, once, at process start. Called by every service's `app`.

Refuses unusable files with a hint for the fix. No message contains file contents.
"""

from __future__ import annotations

import ipaddress
import ssl
import stat
from pathlib import Path

from baton.domain.trust import ClusterTrust, TlsIdentity
from baton.settings.base import SettingsError
from baton.settings.groups import ClusterTrustSettings, ServiceSettings

MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096
MAX_SECRETS = 2
"""Secrets that are valid at once: one, or two while they are rotated."""
_MAX_PEM_BYTES = 1024 * 1024
_FOR_OTHERS = stat.S_IRWXO | stat.S_IWGRP


def read_trust(settings: ClusterTrustSettings) -> ClusterTrust:
    """The credentials of this process. Raises `SettingsError` for missing, world-readable or unusable files."""
    path = settings.cluster_secret_file
    secret, second = (None, None) if path is None else _read_secrets(path)
    return ClusterTrust(secret, _read_identity(settings), second)


def open_cluster_warning(settings: ServiceSettings) -> str | None:
    """A warning if other machines can reach this process and it has no cluster secret; None otherwise."""
    if settings.cluster_secret_file is not None or _is_loopback(settings.host):
        return None
    return f"other machines may reach {settings.host}, and without --cluster-secret-file workers serve any caller"


def _read_secrets(path: Path) -> tuple[bytes, bytes | None]:
    """The secret of the first line, and that of the second if there is one."""
    lines = [line.strip() for line in _read_private(path, "cluster_secret_file", MAX_SECRET_BYTES).split(b"\n")]
    secrets = [line for line in lines if line] or [b""]
    hint = "Make one: openssl rand -hex 32."
    if len(secrets) > MAX_SECRETS:
        why = f"it holds {len(secrets)} secrets, one a line; at most {MAX_SECRETS} are valid at once"
        raise SettingsError(f"cluster_secret_file {path}", why=why, hint="Remove the lines of old secrets.")
    if len(shortest := min(secrets, key=len)) < MIN_SECRET_BYTES:
        why = f"a line holds {len(shortest)} bytes, at least {MIN_SECRET_BYTES} are needed"
        raise SettingsError(f"cluster_secret_file {path}", why=why, hint=hint)
    return secrets[0], secrets[1] if len(secrets) > 1 else None


def _read_identity(settings: ClusterTrustSettings) -> TlsIdentity | None:
    certificate, key, authorities = settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file
    if certificate is None and key is None and authorities is None:
        return None
    if certificate is None or key is None or authorities is None:
        why = "one or two of tls_cert_file, tls_key_file and tls_ca_file are missing"
        raise SettingsError("certificates", why=why, hint="Give all three, or none.")
    identity = TlsIdentity(
        _read(certificate, "tls_cert_file", _MAX_PEM_BYTES),
        _read_private(key, "tls_key_file", _MAX_PEM_BYTES),
        _read(authorities, "tls_ca_file", _MAX_PEM_BYTES),
    )
    _check_pair(certificate, key, authorities)
    return identity


def _check_pair(certificate: Path, key: Path, authorities: Path) -> None:
    """Checks the files with `ssl`: gRPC accepts anything and then fails every handshake without a reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        why = f"certificate and key {key} do not fit together or cannot be read ({_reason(error)})"
        raise SettingsError(f"tls_cert_file {certificate}", why=why, hint="Give PEM files of one pair.") from None
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        why = f"it holds no certificate ({_reason(error)})"
        raise SettingsError(f"tls_ca_file {authorities}", why=why, hint="Give the authority's PEM file.") from None


def _no_password() -> str:
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)


def _read_private(path: Path, setting: str, max_bytes: int) -> bytes:
    content = _read(path, setting, max_bytes)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _FOR_OTHERS:
        why = f"its mode is {mode:04o}, others may read or change it"
        raise SettingsError(f"{setting} {path}", why=why, hint=f"chmod 600 {path}, or 640 for its group.")
    return content


def _read(path: Path, setting: str, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(f"{setting} {path}", why=why, hint="Correct the path, or who may read it.") from None
    if len(content) > max_bytes:
        raise SettingsError(f"{setting} {path}", why=f"it is larger than {max_bytes} bytes", hint="Correct the path.")
    return content


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
