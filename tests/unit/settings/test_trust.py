"""Secret and certificate files become a `ClusterTrust`, or a refusal with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.domain.trust import ClusterTrust
from baton.services.router.settings import RouterSettings
from baton.settings.base import SettingsError
from baton.settings.trust import open_cluster_warning, read_trust
from tests.certificates import CertificateAuthority, encrypt_key

SECRET = b"0123456789abcdef0123456789abcdef"
OTHER = b"fedcba9876543210fedcba9876543210"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.make(tmp_path_factory.mktemp("authority"))


def refusal(**files: Path) -> str:
    with pytest.raises(SettingsError) as refused:
        read_trust(RouterSettings(**files))  # type: ignore[arg-type]
    return str(refused.value)


def test_the_secret_is_read_from_the_file(secret: Path):
    assert read_trust(RouterSettings(cluster_secret_file=secret)).secret == SECRET
    assert read_trust(RouterSettings()).secret is None


@pytest.mark.parametrize("text", [SECRET + b"\n" + OTHER, SECRET + b" \r\n\n" + OTHER + b"\n"])
def test_a_second_line_is_valid_too_and_signs_nothing(secret: Path, text: bytes):
    secret.write_bytes(text)
    trust = read_trust(RouterSettings(cluster_secret_file=secret))
    assert trust.secrets == (SECRET, OTHER)
    assert trust.key("page") == ClusterTrust(SECRET).key("page")
    assert trust.keys("page") == (ClusterTrust(SECRET).key("page"), ClusterTrust(OTHER).key("page"))


@pytest.mark.parametrize(
    ("text", "why"), [(b"\n".join([SECRET, OTHER, OTHER]), "3 secrets"), (SECRET + b"\nshort", "5 bytes")]
)
def test_a_third_line_or_a_short_one_is_refused(secret: Path, text: bytes, why: str):
    secret.write_bytes(text)
    message = refusal(cluster_secret_file=secret)
    assert why in message
    assert SECRET.decode() not in message


@pytest.mark.parametrize("mode", [0o604, 0o606, 0o620, 0o601])
def test_a_secret_open_to_other_users_is_refused(secret: Path, mode: int):
    secret.chmod(mode)
    message = refusal(cluster_secret_file=secret)
    assert f"{mode:04o}" in message
    assert "chmod 600" in message


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_a_secret_may_be_read_by_its_group(secret: Path, mode: int):
    secret.chmod(mode)
    assert read_trust(RouterSettings(cluster_secret_file=secret)).secret == SECRET


@pytest.mark.parametrize(("content", "why"), [(SECRET[:31], "31 bytes"), (b"", "0 bytes"), (b"x" * 5000, "larger")])
def test_a_secret_of_wrong_length_is_refused_and_not_shown(secret: Path, content: bytes, why: str):
    secret.write_bytes(content)
    message = refusal(cluster_secret_file=secret)
    assert why in message
    assert SECRET[:31].decode() not in message


def test_a_missing_file_is_named(tmp_path: Path):
    assert str(tmp_path / "nowhere") in refusal(cluster_secret_file=tmp_path / "nowhere")


def test_the_three_tls_files_must_be_given_together(authority: CertificateAuthority):
    files = authority.issue("router")
    for name, path in files.settings.items():
        assert "are missing" in refusal(**{name: path})
        assert "are missing" in refusal(**{other: path for other, path in files.settings.items() if other != name})
    tls = read_trust(RouterSettings(**files.settings)).tls  # type: ignore[arg-type]
    assert tls is not None
    assert (tls.certificate, tls.key) == (files.certificate.read_bytes(), files.key.read_bytes())
    assert tls.key.decode().splitlines()[1] not in repr(tls)


def test_an_unusable_certificate_is_refused_by_name(authority: CertificateAuthority, tmp_path: Path):
    mine, other = authority.issue("mine"), authority.issue("other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate\n")
    garbage.chmod(0o600)
    assert "do not fit together" in refusal(**{**mine.settings, "tls_key_file": other.key})
    assert "do not fit together" in refusal(**{**mine.settings, "tls_cert_file": garbage})
    assert "holds no certificate" in refusal(**{**mine.settings, "tls_ca_file": garbage})
    mine.key.chmod(0o644)
    assert "0644" in refusal(**mine.settings)


def test_a_key_with_a_password_is_refused_without_a_prompt(authority: CertificateAuthority, tmp_path: Path):
    files, locked = authority.issue("locked"), tmp_path / "locked.key"
    encrypt_key(files.key, locked)
    assert "password" in refusal(**{**files.settings, "tls_key_file": locked})


@pytest.mark.parametrize(
    ("host", "open_"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("node-3", True)]
)
def test_a_reachable_open_cluster_gives_a_warning(host: str, open_: bool, secret: Path):
    assert (open_cluster_warning(RouterSettings(host=host)) is not None) is open_
    assert open_cluster_warning(RouterSettings(host=host, cluster_secret_file=secret)) is None
