"""The response header that names the fields of a request that nobody here knows. Used by `respond` and `resume`."""

from __future__ import annotations

import re
from collections.abc import Sequence

UNKNOWN_FIELDS = "x-baton-unknown-fields"
MAX_NAMES = 10
MAX_NAME_CHARS = 64

_UNWANTED = re.compile(r"[^!-+\--~]")  # all but visible ASCII without the comma


def unknown_fields_header(names: Sequence[str]) -> dict[str, str]:
    """The header; nothing without names. At most `MAX_NAMES`, each as printable ASCII of at most `MAX_NAME_CHARS`."""
    if not names:
        return {}
    return {UNKNOWN_FIELDS: ", ".join(_UNWANTED.sub("?", name[:MAX_NAME_CHARS]) or "?" for name in names[:MAX_NAMES])}
