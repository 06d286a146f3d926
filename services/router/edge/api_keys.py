"""Makes, stores and compares API keys. Knows nothing of HTTP.

The key file has one line a key: `<tenant> <SHA-256 of the key, in hex>`; a `#` starts a comment. A third word,
`operator`, lets the key see the whole cluster and the requests of all tenants. `baton key` makes keys. A key has 256
random bits, so a plain digest protects it as well as a slow one; slow digests are for passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.settings.base import SettingsError

KEY_PREFIX = "sk-baton-"
"""Marks a key for people and for tools that look for leaked secrets."""

KEY_BYTES = 32
OPERATOR = "operator"
MAX_TENANT_CHARS = 64

_TENANT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TENANT_CHARS - 1}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORM = "<tenant> <64 hex digits>, with or without the word operator"


@dataclass(frozen=True, slots=True)
class ApiKeyEntry:
    """One line of the key file: the digest of a key, and its tenant. A tenant may have several keys.

    `operator`: the key sees the whole cluster, and the requests of all tenants without their texts.
    """

    tenant: str
    digest: bytes
    operator: bool = False

    def line(self) -> str:
        """The line of the key file."""
        return f"{self.tenant} {self.digest.hex()}{' ' + OPERATOR if self.operator else ''}"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """All accepted keys."""

    entries: tuple[ApiKeyEntry, ...]

    def find(self, key: str) -> ApiKeyEntry | None:
        """The entry of a key; None for an unknown key.

        Compares every entry in constant time, so that the duration reveals nothing about any of them.
        """
        digest = key_digest(key)
        found: ApiKeyEntry | None = None
        for entry in self.entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found

    def tenant_of(self, key: str) -> str | None:
        """The tenant of a key; None for an unknown key."""
        entry = self.find(key)
        return None if entry is None else entry.tenant

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Reads a key file. Raises `SettingsError`, which names the file and the line, never the content."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise _bad(str(path), error.strerror or "cannot be read", "Correct the path, or its permissions.") from None
        except UnicodeDecodeError:
            raise _bad(str(path), "is not a text in UTF-8", "Write it with baton key.") from None
        return cls(tuple(_entries(path, lines)))


def new_key() -> str:
    """A random key: 256 bits in 43 characters, after `KEY_PREFIX`."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_digest(key: str) -> bytes:
    """Digest of any string: clients may send any."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def make_entry(tenant: str, key: str, *, operator: bool = False) -> ApiKeyEntry:
    """The entry of a key. Raises `SettingsError` for a tenant name that the file cannot hold."""
    if not _TENANT.fullmatch(tenant):
        why = f"must have 1 to {MAX_TENANT_CHARS} letters, digits, dots, dashes and underscores"
        raise SettingsError(f"tenant {tenant[:MAX_TENANT_CHARS]!r}", why=why, hint="Choose such a name.")
    return ApiKeyEntry(tenant, key_digest(key), operator)


def _entries(path: Path, lines: Iterable[str]) -> list[ApiKeyEntry]:
    entries: list[ApiKeyEntry] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        operator = words[2:] == [OPERATOR]
        if len(words) != 2 + operator or not _TENANT.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
            raise _bad(f"{path}, line {number}", f"is not {_FORM}", "Make lines with baton key.")
        entry = ApiKeyEntry(words[0], bytes.fromhex(words[1]), operator)
        if any(entry.digest == other.digest for other in entries):
            raise _bad(f"{path}, line {number}", "has the digest of an earlier line", "Remove one of them.")
        entries.append(entry)
    if not entries:
        raise _bad(str(path), "holds no key, so every request would be refused", "Add a line with baton key.")
    return entries


def _bad(what: str, why: str, hint: str) -> SettingsError:
    return SettingsError(f"API keys in {what}", why=why, hint=hint)
