"""Fingerprint of what a worker computes with: geometry, weights, config, tokenizer, quantization, adapters, sampler.

Workers with different fingerprints are never linked, and a sequence with a token continues on equal ones only. The
parts travel in `Hello`, so that a refusal names the one that differs. Values only; `baton.engine.build` fills them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

DIGEST_BYTES = 16
PAGE_FORMAT = "page_format"
"""The part that is compared first: the format decides what the others mean."""
OLDEST_PAGE_FORMAT = "1"
"""The format of a peer that does not name one."""
MAX_PARTS = 64
MAX_PART_CHARS = 200
"""Longest name, and longest value, of a part that a peer may send."""


@dataclass(frozen=True, slots=True, order=True)
class FingerprintPart:
    """One named part. `digest`: its content as short text, or a digest of it."""

    name: str
    digest: str


@dataclass(frozen=True)
class Fingerprint:
    """Named parts in any order; equal parts give an equal `digest`."""

    parts: tuple[FingerprintPart, ...]

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of all parts, as 32 hexadecimal digits."""
        return digest_of(line for part in sorted(self.parts) for line in (part.name, part.digest))

    def difference(self, digest: str, parts: tuple[FingerprintPart, ...]) -> str | None:
        """The first difference from a peer's `digest` and `parts`, the page format before all; None if there is none.

        An older peer sends no parts. Parts that do not give `digest` are refused.
        """
        if not parts:
            return None if digest == self.digest else "fingerprint: differs; the peer does not name its parts"
        if len(parts) > MAX_PARTS or any(max(len(p.name), len(p.digest)) > MAX_PART_CHARS for p in parts):
            return "fingerprint: not readable"
        here, there = ({part.name: part.digest for part in side} for side in (self.parts, parts))
        if here.get(PAGE_FORMAT, OLDEST_PAGE_FORMAT) != there.get(PAGE_FORMAT, OLDEST_PAGE_FORMAT):
            formats = (side.get(PAGE_FORMAT, OLDEST_PAGE_FORMAT) for side in (here, there))
            return "{}: {} here, {} there; run one version of Baton on both".format(PAGE_FORMAT, *formats)
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                return f"{name}: {here.get(name)} here, {there.get(name)} there"
        return None if digest == self.digest else "fingerprint: differs from its own parts"


def digest_of(texts: Iterable[str]) -> str:
    """BLAKE2b-128 of a list of texts. Each is framed by its length, so no two lists give the same bytes."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
