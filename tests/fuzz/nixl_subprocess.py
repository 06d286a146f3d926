"""Offers corrupted NIXL metadata and impossible memory to a puller; prints the outcomes as JSON.

Run by `test_nixl_metadata` as a process of its own: corrupted metadata inside the library would be a segmentation
fault.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.trust import ClusterTrust
from baton.kv.memory import PageMemory
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.nixl import NixlPuller, NixlSource
from tests.unit.transfer.rigs import EventLog

NUM_CORRUPTED = 300
SOURCE, INCARNATION = WorkerId("prefill-0"), Incarnation(5)
NUM_PAGES, PAGE_BYTES = 8, 4096
TRUST = ClusterTrust(b"a secret of thirty-two bytes ....")


def main() -> None:
    """Takes no arguments."""
    remote, local, events = PageMemory(NUM_PAGES, PAGE_BYTES), PageMemory(NUM_PAGES, PAGE_BYTES), EventLog()
    remote.buffer[:] = bytes(range(256)) * (NUM_PAGES * PAGE_BYTES // 256)
    source = NixlSource(SOURCE, INCARNATION, remote, TRUST)
    puller = NixlPuller(WorkerId("decode-0"), Incarnation(6), local, events, TRUST)
    good = SourceInfo(SOURCE, INCARNATION, "", "nixl", source.metadata(), remote.address, NUM_PAGES, PAGE_BYTES)
    try:
        outcomes = {name: connect(puller, source) for name, source in malformed_sources(good).items()}
        outcomes["good"] = connect(puller, good)
        pull = Pull(1, SOURCE, (PageId(3),), (PageId(4),), None, 20.0)
        puller.submit(pull)
        moved = events.terminal(pull).outcome is PullOutcome.DONE and local.page(4) == remote.page(3)
    finally:
        puller.close()
        source.close()
    json.dump({"outcomes": outcomes, "moved": moved}, sys.stdout)


def malformed_sources(good: SourceInfo) -> dict[str, SourceInfo]:
    """Inputs of a corrupted message or a broken peer, by name."""
    address, random_ = good.base_address, random.Random(7)
    corrupted = {
        f"corrupted {n}": replace(good, metadata=corrupt(good.metadata, random_)) for n in range(NUM_CORRUPTED)
    }
    return corrupted | {
        "no pages": replace(good, num_pages=0),
        "one page too many": replace(good, num_pages=NUM_PAGES + 1),
        "pages without end": replace(good, num_pages=2**32 - 1),
        "the end of memory": replace(good, base_address=2**64 - 1),
        "memory that wraps around": replace(good, base_address=2**64 - PAGE_BYTES),
        "nothing": replace(good, base_address=0),
        "the page before": replace(good, base_address=address - PAGE_BYTES),
        "the page after": replace(good, base_address=address + PAGE_BYTES),
        "larger pages": replace(good, page_bytes=2 * PAGE_BYTES),
        "pages of nothing": replace(good, page_bytes=0),
        "another worker's": replace(good, worker_id=WorkerId("prefill-1")),
        "another life's": replace(good, incarnation=Incarnation(7)),
    }


def corrupt(metadata: bytes, random_: random.Random) -> bytes:
    """Returns `metadata` with a flipped bit, cut short, or with inserted bytes."""
    body = bytearray(metadata)
    at = random_.randrange(len(body))
    match random_.randrange(3):
        case 0:
            body[at] ^= 1 << random_.randrange(8)
        case 1:
            del body[at:]
        case _:
            body[at:at] = random_.randbytes(1 + random_.randrange(8))
    return bytes(body)


def connect(puller: NixlPuller, info: SourceInfo) -> str:
    """Returns `linked` or the error."""
    try:
        puller.connect(info)
    except LinkBroken as error:
        return f"broken: {error}"
    return "linked"


if __name__ == "__main__":
    main()
