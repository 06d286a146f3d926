"""The program of a forked service of a storm: `serve ROLE --name=value ...`, without the `baton` command.

Building that command and its help from all settings takes more CPU time than all else before a fork loads its model.
`tests/integration` starts its services by the command itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from baton.services.cli.errors import EXPECTED_ERRORS, explain
from baton.services.cli.serve import run_service
from baton.services.decode.settings import DecodeSettings
from baton.services.encode.settings import EncodeSettings
from baton.services.prefill.settings import PrefillSettings
from baton.services.router.settings import RouterSettings
from baton.settings.groups import ServiceSettings

_SETTINGS: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "encode": EncodeSettings,
}


def run(tokens: Sequence[str]) -> int:
    """Serves until the service ends; returns its exit code. Prints expected errors to stderr."""
    _, role, *flags = tokens
    values: dict[str, Any] = dict(map(_setting, flags))
    try:
        return run_service(role, _SETTINGS[role](**values))
    except EXPECTED_ERRORS as error:
        message, code = explain(error)
        sys.stderr.write(f"baton: {message}\n")
        return code


def _setting(flag: str) -> tuple[str, str]:
    name, _, value = flag.removeprefix("--").partition("=")
    return name.replace("-", "_"), value
