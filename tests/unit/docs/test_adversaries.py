"""Every guarantee of the README has an adversary, and every test that `docs/adversaries.md` names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = [line.split(" | ") for line in (ROOT / "docs/adversaries.md").read_text().splitlines() if line.startswith("| ")]
PROMISES = [row[0].removeprefix("| ") for row in ROWS[1:]]


def guarantees() -> list[str]:
    """The words in bold at the beginning of each guarantee."""
    section = (ROOT / "README.md").read_text().split("## Guarantees")[1].split("\n## ")[0]
    return re.findall(r"^- \*\*(.+?)\.?\*\*", section, re.MULTILINE)


@pytest.mark.parametrize("guarantee", guarantees())
def test_each_guarantee_has_an_adversary(guarantee: str) -> None:
    assert any(guarantee.lower() in promise.lower() for promise in PROMISES)


def test_each_row_names_what_plays_its_adversary() -> None:
    assert len(PROMISES) == len(set(PROMISES)) > 40
    for promise, row in zip(PROMISES, ROWS[1:], strict=True):
        assert len(row) == 4, promise
        assert "`tests/" in row[2] or "cells" in row[2], promise


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", "".join(row[2] for row in ROWS[1:])))))
def test_each_named_test_is_there(path: str) -> None:
    assert (ROOT / path).exists()
