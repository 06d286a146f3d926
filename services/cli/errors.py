"""Error messages of commands: what failed, why, and a hint. No traceback for an expected error.

Called by `baton.services.cli.main` only. An unexpected error, or `Broken`, is not translated: it is a bug.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import cyclopts
import pydantic

from baton.domain.errors import BatonError, Broken
from baton.settings.base import env_name
from baton.store.store import WorkerIdInUse

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_ID_TAKEN = 3
EXIT_INTERRUPTED = 130

_HINT_BY_ERRNO = {
    errno.EADDRINUSE: "Stop the process that holds it, or choose another port.",
    errno.EADDRNOTAVAIL: "Give an address of this machine.",
    errno.EACCES: "Choose a port or directory that this user may use.",
    errno.ENOENT: "Correct the path.",
    errno.ENOSPC: "Free some space, or point TMPDIR elsewhere.",
    errno.ENOMEM: "Lower --kv-memory-mib.",
}

ExpectedError = BatonError | OSError | pydantic.ValidationError | cyclopts.CycloptsError
EXPECTED_ERRORS = (BatonError, OSError, pydantic.ValidationError, cyclopts.CycloptsError)


class StartFailed(BatonError):
    """The system did not start, or a process kept failing."""

    code = "start_failed"


class NotDrained(BatonError):
    """The worker did not leave in time, or gave up requests."""

    code = "not_drained"


def explain(error: ExpectedError) -> tuple[str, int]:
    """The message and the exit code. Raises `error` if it is a bug."""
    if isinstance(error, Broken):
        raise error
    if isinstance(error, cyclopts.CycloptsError):
        return _explain_flags(error), EXIT_REFUSED
    if isinstance(error, pydantic.ValidationError):
        return "\n".join(_problems(error)), EXIT_REFUSED
    if isinstance(error, OSError):
        return _explain_os(error), EXIT_REFUSED
    if isinstance(error, WorkerIdInUse):
        return str(error), EXIT_ID_TAKEN
    return str(error), EXIT_FAILED if isinstance(error, StartFailed | NotDrained) else EXIT_REFUSED


def _explain_flags(error: cyclopts.CycloptsError) -> str:
    cause = error.__cause__
    if isinstance(cause, pydantic.ValidationError):
        return "\n".join(_problems(cause))
    return f"{error} See --help."


def _problems(error: pydantic.ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        text = problem["msg"].removeprefix("Value error, ")
        field = str(problem["loc"][0]) if problem["loc"] else None
        if field is None:
            yield f"settings: {text}."
        else:
            flag, given = f"--{field.replace('_', '-')}", problem["input"]
            shown = str(given) if isinstance(given, Path) else given
            yield f"{flag} {shown!r:.80}: {text}. Set it with {flag} or {env_name(field)}."


def _explain_os(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    what = error.strerror or str(error) or type(error).__name__
    hint = _HINT_BY_ERRNO.get(error.errno or 0, "")
    return f"{where}{what}. {hint}".rstrip()
