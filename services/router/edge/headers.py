"""Reads headers of requests, and makes the one that names the fields of a request that no one here knows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import Scope

UNKNOWN_FIELDS = "x-baton-unknown-fields"
MAX_NAMES = 10
MAX_NAME_CHARS = 64

_UNWANTED = re.compile(r"[^!-+\--~]")  # all but visible ASCII without the comma


def header(scope: Scope, name: bytes) -> str:
    """The first value of a header of an ASGI scope; "" without it. `name` in lower case.

    Ten are read a request, and Starlette's `Headers` makes three Python calls for each.
    """
    for each, value in scope["headers"]:
        if each == name:
            return str(value, "latin-1")
    return ""


def has_header(scope: Scope, name: bytes) -> bool:
    """True if an ASGI scope has the header. `name` in lower case."""
    return any([each == name for each, _ in scope["headers"]])


def unknown_fields_header(names: Sequence[str]) -> dict[str, str]:
    """The header; nothing without names. At most `MAX_NAMES`, each as printable ASCII of at most `MAX_NAME_CHARS`."""
    if not names:
        return {}
    return {UNKNOWN_FIELDS: ", ".join(_UNWANTED.sub("?", name[:MAX_NAME_CHARS]) or "?" for name in names[:MAX_NAMES])}
