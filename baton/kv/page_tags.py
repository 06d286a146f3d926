"""Page tags: authenticate pages whose bytes travel in clear. GMAC with keys from the cluster secret.

A tag covers the page's bytes and its identity: the model's fingerprint and the key chained over all tokens up to the
page's end. So a valid pair of bytes and tag cannot be replayed for other tokens, another salt or another model. It is
sent as nonce (12 bytes: 8 of the source's run, 4 of a counter) and authenticator (16).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.domain.ids import Incarnation, PageId, new_incarnation
from baton.domain.trust import ClusterTrust
from baton.kv.keys import next_key, page_keys, root_key
from baton.kv.memory import PoolMemory

NONCE_BYTES = 12
TAG_BYTES = NONCE_BYTES + 16
PURPOSE = "page"
_COUNTER_BYTES = 4
_MAX_COUNT = 1 << (8 * _COUNTER_BYTES)


@dataclass(frozen=True, slots=True)
class PageTag:
    """A page's announced tag, and the identity that the puller expects it to bind."""

    identity: bytes
    tag: bytes


def page_identities(tokens: Sequence[int], page_size: int, salt: str, fingerprint: str) -> list[bytes]:
    """Identities of all pages of `tokens`, in order; the last page may be partial."""
    keys = page_keys(tokens, page_size, salt)
    if tail := tokens[len(keys) * page_size :]:
        keys.append(next_key(keys[-1] if keys else root_key(salt), tail))
    return [key + fingerprint.encode() for key in keys]


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
            nonce = self._next_nonce()
            tags.append(nonce + _authenticator(self._cipher, nonce, self._memory.read([page])[0], identity))
        return tags

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

    def fits(self, content: memoryview, tag: PageTag) -> bool:
        """True if a holder of the secret made `tag` for these bytes and this identity."""
        if len(tag.tag) != TAG_BYTES:
            return False
        nonce, given = tag.tag[:NONCE_BYTES], tag.tag[NONCE_BYTES:]
        return any(
            hmac.compare_digest(_authenticator(cipher, nonce, content, tag.identity), given) for cipher in self._ciphers
        )

    def mismatches(self, memory: PoolMemory, pages: Sequence[PageId], tags: Sequence[PageTag]) -> list[int]:
        """Positions in `pages` whose bytes do not fit their tag."""
        pairs = enumerate(zip(pages, tags, strict=True))
        return [at for at, (page, tag) in pairs if not self.fits(memory.read([page])[0], tag)]


def _authenticator(cipher: AESGCM, nonce: bytes, content: memoryview, identity: bytes) -> bytes:
    """GCM's tag over `content` as associated data and `identity` as plaintext; `content` is not copied."""
    return cipher.encrypt(nonce, identity, content)[-16:]
