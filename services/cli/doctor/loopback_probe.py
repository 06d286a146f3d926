"""Moves pages between two processes of this machine over NIXL and checks their digests: `python -m` this module.

The puller starts the source as its child, as a decode worker's neighbour would run: in one process UCX would take
another transport. Both end when their parent closes the pipe. Prints one line of JSON.
"""

from __future__ import annotations

import base64
import json
import random
import secrets
import subprocess
import sys
import threading
from typing import Any

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.kv.memory import PageMemory
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.digest import digest_pages
from baton.transfer.factory import make_puller, make_source
from baton.transfer.nixl import TRANSPORT, NixlPuller

NUM_PAGES = 128
PAGE_BYTES = 512 * 1024
"""64 MiB in all."""
DEADLINE_S = 20.0
MARKER = "baton-loopback "
"""Starts the line with the result; NIXL and UCX may write other lines to standard output."""
_SOURCE, _PULLER = WorkerId("doctor-source"), WorkerId("doctor-puller")
_PAGES = tuple(PageId(page) for page in range(NUM_PAGES))
_CORRUPT = "--corrupt"


def main(arguments: list[str]) -> None:
    """`source [--corrupt]` serves until standard input ends; otherwise pulls from such a child and prints the result.

    `--corrupt` damages a page after its digest was taken, so that the comparison can be seen to work.
    """
    if arguments[:1] == ["source"]:
        serve(corrupt=_CORRUPT in arguments)
    else:
        answer = pull_from_child(corrupt=_CORRUPT in arguments)
        sys.stdout.write(f"{MARKER}{json.dumps(answer)}\n")


def serve(*, corrupt: bool) -> None:
    """The source: prints how to reach its pages, and their digests, then waits for the end of standard input."""
    memory = PageMemory(NUM_PAGES, PAGE_BYTES, prefault=True)
    memory.buffer[:] = random.Random(secrets.randbits(64)).randbytes(NUM_PAGES * PAGE_BYTES)
    digests = digest_pages(memory, _PAGES)
    if corrupt:
        memory.page(NUM_PAGES // 2)[PAGE_BYTES // 3] ^= 1
    source = make_source(TRANSPORT, _SOURCE, Incarnation(1), memory)
    offer = {
        "metadata": base64.b64encode(source.metadata()).decode(),
        "address": memory.address,
        "digests": [str(digest) for digest in digests],
    }
    sys.stdout.write(f"{MARKER}{json.dumps(offer)}\n")
    sys.stdout.flush()
    sys.stdin.read()
    source.close()


def pull_from_child(*, corrupt: bool) -> dict[str, Any]:
    """Pulls all pages twice: the first pull makes the connection, the second is timed."""
    command = [sys.executable, "-m", __spec__.name, "source", *([_CORRUPT] if corrupt else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        offer = next((json.loads(line.removeprefix(MARKER)) for line in child.stdout if line.startswith(MARKER)), None)
        try:
            if offer is None:
                return {"error": "the source process ended before it offered its pages"}
            return _pull(offer)
        except LinkBroken as error:
            return {"error": str(error)}
        finally:
            child.stdin.close()


def _pull(offer: dict[str, Any]) -> dict[str, Any]:
    memory = PageMemory(NUM_PAGES, PAGE_BYTES, prefault=True)
    ended = threading.Event()
    events: list[PullEvent] = []

    def on_event(event: PullEvent) -> None:
        events.append(event)
        ended.set()

    puller = make_puller(TRANSPORT, _PULLER, Incarnation(2), memory, on_event)
    assert isinstance(puller, NixlPuller)
    metadata = base64.b64decode(offer["metadata"])
    info = SourceInfo(_SOURCE, Incarnation(1), "", TRANSPORT, metadata, offer["address"], NUM_PAGES, PAGE_BYTES)
    puller.connect(info)
    digests = [int(digest) for digest in offer["digests"]]
    for number in range(2):
        ended.clear()
        puller.submit(Pull(number, _SOURCE, _PAGES, _PAGES, digests, DEADLINE_S))
        if not ended.wait(DEADLINE_S + 1.0) or events[-1].outcome is not PullOutcome.DONE:
            break
    path = puller.path(_SOURCE)
    puller.close()
    if not events or events[-1].outcome is not PullOutcome.DONE:
        last = events[-1] if events else None
        outcome = "nothing arrived" if last is None else f"{last.outcome.value} {last.reason}".strip()
        return {"error": outcome, "path": path}
    return {"path": path, "bytes": events[-1].num_bytes, "seconds": events[-1].seconds, "pages": NUM_PAGES}


if __name__ == "__main__":
    main(sys.argv[1:])
