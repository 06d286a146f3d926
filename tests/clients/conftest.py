"""Where the clients find the router: each at a path of its own, so that what it sends is recorded under its name."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

URL = os.environ["BATON_CLIENTS_URL"]


@pytest.fixture
def base_url() -> Callable[[str], str]:
    """The address of the router for a client, without `/v1`."""
    return lambda client: f"{URL}/{client}"


@pytest.fixture
def tokenizer_dir() -> str:
    """The directory of the bundled model: tools that make prompts count its tokens."""
    return os.environ["BATON_CLIENTS_MODEL"]
