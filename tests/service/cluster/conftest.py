"""API keys of two tenants and an operator, in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.services.router.edge.api_keys import make_entry
from tests.service.cluster.live_router import BLUE, OPERATOR, RED


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    entries = [make_entry("red", RED), make_entry("blue", BLUE), make_entry("ops", OPERATOR, operator=True)]
    path = tmp_path / "keys"
    path.write_text("\n".join(entry.line() for entry in entries))
    return path
