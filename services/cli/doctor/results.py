"""Result of one check, and the two ways to print results: lines for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """OK: nothing to do. WARN: it works, but worse than it could. FAIL: something does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """`found`: what was measured or read. `fix`: what to do; only an OK result has none."""

    name: str
    status: CheckStatus
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        if bool(self.fix) == (self.status is CheckStatus.OK):
            raise ValueError(f"a result has a fix unless it is ok: {self.name}: {self.found}")

    def line(self) -> str:
        """`FAIL memlock: 64 KiB. Do: ulimit -l unlimited`."""
        word = "FAIL" if self.status is CheckStatus.FAIL else self.status.value
        return f"{word:<4} {self.name}: {self.found}" + (f". Do: {self.fix}" if self.fix else "")


def ok(name: str, found: str) -> DoctorResult:
    """A check that found nothing to do."""
    return DoctorResult(name, CheckStatus.OK, found)


def warn(name: str, found: str, fix: str) -> DoctorResult:
    """A check that found something that could be better."""
    return DoctorResult(name, CheckStatus.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> DoctorResult:
    """A check that found something broken."""
    return DoctorResult(name, CheckStatus.FAIL, found, fix)


def all_pass(results: Iterable[DoctorResult]) -> bool:
    """True if no result is FAIL."""
    return all(result.status is not CheckStatus.FAIL for result in results)


def as_json(results: Iterable[DoctorResult]) -> str:
    """One object: `ok`, and `checks` in the order in which they ran."""
    found = list(results)
    return json.dumps({"ok": all_pass(found), "checks": [asdict(result) for result in found]}, indent=2)
