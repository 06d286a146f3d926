"""`baton key TENANT`: makes an API key; and the key that `baton up` gives itself for its first request.

Registered by `services.cli.main`. What a key is, and what the file looks like, the router's `keys` says.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from services.router.edge.api_keys import ApiKeys, make_entry, new_key

OWN_TENANT = "baton-up"


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """A file of API keys of which one is known here."""

    file: Path
    key: str = field(repr=False)


def key(tenant: str, /) -> int:
    """Make an API key for TENANT and print the line that the router's --api-keys-file needs.

    The line goes to standard output (append it to the file), the key to standard error. It is shown this once: the line
    holds only its digest. A tenant may have several keys; the router reads the file when it starts.
    """
    made = new_key()
    line = make_entry(tenant, made).line()
    print(f"The key of {tenant}, shown only now: {made}", file=sys.stderr)
    print(f"{line}  # made {datetime.now(UTC):%Y-%m-%d}")
    return 0


@contextlib.contextmanager
def own_keys(given: Path | None) -> Iterator[OwnKeys | None]:
    """The keys in `given` and one more, in a file that goes with the context; None when no keys are asked for.

    Raises `SettingsError` for a file that the router would refuse.
    """
    if given is None:
        yield None
        return
    own = new_key()
    entries = [*ApiKeys.read(given).entries, make_entry(OWN_TENANT, own)]
    with tempfile.NamedTemporaryFile("w", prefix="baton-keys-") as file:  # made with mode 0600
        file.writelines(f"{entry.line()}\n" for entry in entries)
        file.flush()
        yield OwnKeys(Path(file.name), own)
