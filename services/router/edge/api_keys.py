"""API keys: how they are made, written down and compared. `guard` asks it who a key belongs to.

The file that the router reads has one line a key, `<tenant> <SHA-256 of the key, in hex>`; what follows a `#` is a
comment. `baton key` makes keys. A key has 256 random bits, so nobody can try them all, and a plain digest hides it as
well as a slow one would; slow ones are for passwords. Knows nothing of HTTP.
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
"""So that people, and tools that look for leaked secrets, see what it is."""

KEY_BYTES = 32
MAX_TENANT_CHARS = 64

_TENANT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TENANT_CHARS - 1}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORM = "<tenant> <64 hex digits>"


@dataclass(frozen=True, slots=True)
class ApiKeyEntry:
    """One line of the file: the digest of a key, and whose it is. A tenant may have several keys."""

    tenant: str
    digest: bytes

    def line(self) -> str:
        """As the file has it."""
        return f"{self.tenant} {self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """All keys that are let in."""

    entries: tuple[ApiKeyEntry, ...]

    def tenant_of(self, key: str) -> str | None:
        """Whose key it is; None for nobody's.

        Every entry is compared, in constant time, so that the time taken tells nothing about any of them.
        """
        digest = key_digest(key)
        found: str | None = None
        for entry in self.entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.tenant
        return found

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """The keys in a file. Raises `SettingsError` that names the file and the line, never what is in it."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise _bad(str(path), error.strerror or "cannot be read", "Correct the path, or its permissions.") from None
        except UnicodeDecodeError:
            raise _bad(str(path), "is not a text in UTF-8", "Write it with baton key.") from None
        return cls(tuple(_entries(path, lines)))


def new_key() -> str:
    """A fresh key: 256 random bits in 43 characters, behind `KEY_PREFIX`."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_digest(key: str) -> bytes:
    """What is kept of a key; for any string, since clients send any."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def make_entry(tenant: str, key: str) -> ApiKeyEntry:
    """The entry of a key. Raises `SettingsError` for a tenant's name that the file could not hold."""
    if not _TENANT.fullmatch(tenant):
        why = f"must have 1 to {MAX_TENANT_CHARS} letters, digits, dots, dashes and underscores"
        raise SettingsError(f"tenant {tenant[:MAX_TENANT_CHARS]!r}", why=why, hint="Choose such a name.")
    return ApiKeyEntry(tenant, key_digest(key))


def _entries(path: Path, lines: Iterable[str]) -> list[ApiKeyEntry]:
    entries: list[ApiKeyEntry] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _TENANT.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
            raise _bad(f"{path}, line {number}", f"is not {_FORM}", "Make lines with baton key.")
        entry = ApiKeyEntry(words[0], bytes.fromhex(words[1]))
        if any(entry.digest == other.digest for other in entries):
            raise _bad(f"{path}, line {number}", "has the digest of an earlier line", "Remove one of them.")
        entries.append(entry)
    if not entries:
        raise _bad(str(path), "holds no key, so that nobody could come in", "Add a line with baton key.")
    return entries


def _bad(what: str, why: str, hint: str) -> SettingsError:
    return SettingsError(f"API keys in {what}", why=why, hint=hint)
