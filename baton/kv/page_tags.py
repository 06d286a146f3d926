"""Page tags: authenticate pages whose bytes travel in clear. GMAC with keys from the cluster secret.

Each part of a page (`baton.kv.geometry`) has a tag, and the page's tag is all of them, one after another. A tag covers
the part's bytes and number, and the page's identity: the model's fingerprint and the key chained over all tokens up to
the page's end. So a valid pair of bytes and tag cannot be replayed for another part, other tokens, another salt or
another model. It is sent as nonce (12 bytes: 8 of the source's run, 4 of a counter) and authenticator (16).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.domain.ids import Incarnation, PageId, PageKey, new_incarnation
from baton.domain.request import EngineRequest
from baton.domain.trust import ClusterTrust
from baton.kv.keys import next_key, page_extras, page_keys, root_key
from baton.kv.memory import PoolMemory

NONCE_BYTES = 12
TAG_BYTES = NONCE_BYTES + 16
"""Bytes of one part's tag."""
PURPOSE = "page"
_COUNTER_BYTES = 4
_MAX_COUNT = 1 << (8 * _COUNTER_BYTES)


@dataclass(frozen=True, slots=True)
class PageTag:
    """A page's announced tag, `TAG_BYTES` a part, and the identity that the puller expects it to bind."""

    identity: bytes
    tag: bytes


def page_identities(request: EngineRequest, page_size: int, fingerprint: str) -> list[bytes]:
    """Identities of all pages of the request's tokens, in order; the last page may be partial."""
    tokens, media = request.tokens, request.media
    keys = page_keys(tokens, page_size, request.salt, media)
    if tail := tokens[len(keys) * page_size :]:
        extras = page_extras(len(keys) * page_size, len(tokens), media)
        keys.append(next_key(keys[-1] if keys else root_key(request.salt), tail, extras))
    return [page_identity(key, fingerprint) for key in keys]


def page_identity(key: PageKey, fingerprint: str) -> bytes:
    """Identity of the page that `key` names, under a model."""
    return key + fingerprint.encode()


def join_tags(parts: Sequence[bytes], num_parts: int) -> tuple[bytes, ...]:
    """Tags of pages from those of their parts, page after page."""
    return tuple([b"".join(parts[start : start + num_parts]) for start in range(0, len(parts), num_parts)])


def split_tags(tags: Sequence[bytes]) -> list[bytes]:
    """The inverse of `join_tags`."""
    return [tag[start : start + TAG_BYTES] for tag in tags for start in range(0, len(tag), TAG_BYTES)]


class PoolTagger:
    """Makes the tags of one pool's pages. Owned by the engine thread."""

    def __init__(self, memory: PoolMemory, key: bytes, incarnation: Incarnation) -> None:
        self._memory = memory
        self._cipher = AESGCM(key)
        self._run = incarnation.to_bytes(NONCE_BYTES - _COUNTER_BYTES)
        self._count = 0

    def tags(self, pages: Sequence[PageId], identities: Sequence[bytes]) -> list[bytes]:
        """Tags of the bytes of `pages` as they are now."""
        tags = []
        for page, identity in zip(pages, identities, strict=True):
            (parts,) = self._memory.parts([page])
            tags.append(b"".join([self._tag(part, _bind(identity, number)) for number, part in enumerate(parts)]))
        return tags

    def _tag(self, part: memoryview, bound: bytes) -> bytes:
        nonce = self._next_nonce()
        return nonce + _authenticator(self._cipher, nonce, part, bound)

    def _next_nonce(self) -> bytes:
        """A nonce that this key has not seen: a used up counter starts again under another random number."""
        if self._count == _MAX_COUNT:
            self._run, self._count = new_incarnation().to_bytes(NONCE_BYTES - _COUNTER_BYTES), 0
        nonce = self._run + self._count.to_bytes(_COUNTER_BYTES)
        self._count += 1
        return nonce


class TagVerifier:
    """Verifies tags with all valid keys of the cluster."""

    def __init__(self, trust: ClusterTrust) -> None:
        self._ciphers = [AESGCM(key) for key in trust.keys(PURPOSE)]

    def fits(self, parts: Sequence[memoryview], tag: PageTag) -> bool:
        """True if a holder of the secret made `tag` for these parts of a page and this identity."""
        if len(tag.tag) != TAG_BYTES * len(parts):
            return False
        pairs = enumerate(zip(parts, split_tags([tag.tag]), strict=True))
        return all(self._fits(part, one, _bind(tag.identity, number)) for number, (part, one) in pairs)

    def mismatches(
        self, memory: PoolMemory, pages: Sequence[PageId], tags: Sequence[PageTag], num_parts: int | None = None
    ) -> list[int]:
        """Positions in `pages` whose bytes do not fit their tag. `num_parts`: of leading parts; None: of all."""
        if num_parts is not None:
            tags = [PageTag(tag.identity, tag.tag[: TAG_BYTES * num_parts]) for tag in tags]
        pairs = enumerate(zip(pages, tags, strict=True))
        return [at for at, (page, tag) in pairs if not self.fits(memory.parts([page])[0][:num_parts], tag)]

    def _fits(self, part: memoryview, tag: bytes, bound: bytes) -> bool:
        nonce, given = tag[:NONCE_BYTES], tag[NONCE_BYTES:]
        return any(hmac.compare_digest(_authenticator(cipher, nonce, part, bound), given) for cipher in self._ciphers)


def _bind(identity: bytes, number: int) -> bytes:
    """What the tag of a page's part binds beside its bytes."""
    return identity + number.to_bytes(2)


def _authenticator(cipher: AESGCM, nonce: bytes, content: memoryview, identity: bytes) -> bytes:
    """GCM's tag over `content` as associated data and `identity` as plaintext; `content` is not copied."""
    return cipher.encrypt(nonce, identity, content)[-16:]
