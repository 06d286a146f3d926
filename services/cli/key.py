"""`baton key TENANT`: makes an API key. Also makes the key of the smoke request of `baton up`.

`baton.services.router.edge.api_keys` defines keys and the file format.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from baton.services.router.edge.api_keys import ApiKeys, make_entry, new_key

OWN_TENANT = "baton-up"


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """A file of API keys, one of which is known in the clear."""

    file: Path
    key: str = field(repr=False)


def key(
    tenant: str,
    /,
    *,
    operator: Annotated[bool, Parameter(negative="", help="The key sees the whole cluster on the page.")] = False,
) -> int:
    """Make an API key for TENANT and print its line of the router's --api-keys-file.

    The line goes to standard output: append it to the file. The key goes to standard error and is not shown again: the
    line holds only its digest. A tenant may have several keys. The router reads the file when it starts.
    """
    made = new_key()
    line = make_entry(tenant, made, operator=operator).line()
    print(f"The key of {tenant}, shown only now: {made}", file=sys.stderr)
    print(f"{line}  # made {datetime.now(UTC):%Y-%m-%d}")
    return 0


@contextlib.contextmanager
def own_keys(given: Path | None) -> Iterator[OwnKeys | None]:
    """The keys in `given` and a new one, in a file that is removed with the context; None without `given`.

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
