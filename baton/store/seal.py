"""Seals what Redis keeps of calls: authenticated encryption (AES-256-GCM) under keys of the cluster secret.

Called by the codecs of `baton.store.redis`. A blob is bound to its kind, the deployment's key prefix and the id of its
call or sequence, so it cannot be used in another place. A blob is: version, key id, nonce, ciphertext, tag. Without a
secret it is the version `CLEAR` and the payload. Every id has a key of its own: HKDF-Expand (RFC 5869) of the secret's
store key. Pure but for random nonces.
"""

from __future__ import annotations

import enum
import functools
import hmac
import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust

CLEAR, SEALED = b"\x00", b"\x01"
"""Versions: the first byte of a blob."""

MAX_CIPHERS = 1024
"""Ids whose ciphers are kept."""

_KEY_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 4, 12, 16
_NONCE_AT = len(SEALED) + _KEY_ID_BYTES
_CIPHERTEXT_AT = _NONCE_AT + _NONCE_BYTES


class SealedKind(enum.Enum):
    """Kinds of blobs; the value is part of what a blob is bound to, and the metric's label."""

    CALL = "call"
    TRACE = "trace"
    SEQUENCE = "sequence"
    FINGERPRINT = "fingerprint"
    JOURNAL = "journal"
    MEDIA = "media"
    VIEW = "view"


class SealFault(enum.Enum):
    """Reason not to use a blob; the value is the metric's label.

    CLEAR: it is not sealed, and this process has a secret. UNKNOWN_KEY: sealed under a secret that is not valid here.
    FORGED: changed, cut short, or made for another place. UNREADABLE: not a blob, or its payload is of another version.
    REPLAYED: older than any call that the store may still hold. GAP: entries before it are missing.
    """

    CLEAR = "clear"
    UNKNOWN_KEY = "unknown_key"
    FORGED = "forged"
    UNREADABLE = "unreadable"
    REPLAYED = "replayed"
    GAP = "gap"


class SealError(Exception):
    """A blob that must not be used."""

    def __init__(self, fault: SealFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class StoreSeal:
    """Seals with the first secret of `trust` and opens with all of them; an open cluster stores in clear."""

    def __init__(self, prefix: str, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        self._prefix = prefix
        key_ids = [key[:_KEY_ID_BYTES] for key in trust.keys("store-key-id")]
        self._store_keys = dict(reversed(list(zip(key_ids, trust.keys("store"), strict=True))))
        self._sealing_key_id = key_ids[0] if key_ids else None
        self._cipher = functools.lru_cache(maxsize=MAX_CIPHERS)(self._make_cipher)

    @property
    def active(self) -> bool:
        """True if this process has a secret."""
        return self._sealing_key_id is not None

    @property
    def overhead(self) -> int:
        """Bytes by which a blob is longer than its payload."""
        return _CIPHERTEXT_AT + _TAG_BYTES if self.active else len(CLEAR)

    def seal(self, kind: SealedKind, id: str, payload: bytes) -> bytes:
        """The blob of `payload`, for the call, sequence or file `id`."""
        key_id = self._sealing_key_id
        if key_id is None:
            return CLEAR + payload
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join(
            (SEALED, key_id, nonce, self._cipher(key_id, id).encrypt(nonce, payload, self._place(kind, id)))
        )

    def open(self, kind: SealedKind, id: str, blob: bytes) -> bytes:
        """The payload of a blob that was sealed for this kind and id. Raises `SealError`."""
        if blob[:1] == CLEAR:
            if self.active:
                raise SealError(SealFault.CLEAR)
            return blob[1:]
        if blob[:1] != SEALED or len(blob) < _CIPHERTEXT_AT + _TAG_BYTES:
            raise SealError(SealFault.UNREADABLE)
        key_id, nonce = blob[len(SEALED) : _NONCE_AT], blob[_NONCE_AT:_CIPHERTEXT_AT]
        if key_id not in self._store_keys:
            raise SealError(SealFault.UNKNOWN_KEY)
        try:
            return self._cipher(key_id, id).decrypt(nonce, blob[_CIPHERTEXT_AT:], self._place(kind, id))
        except InvalidTag:
            raise SealError(SealFault.FORGED) from None

    def _place(self, kind: SealedKind, id: str) -> bytes:
        """The associated data."""
        return msgspec.msgpack.encode((kind.value, self._prefix, id))

    def _make_cipher(self, key_id: bytes, id: str) -> AESGCM:
        """The cipher of one id. One block of HKDF-Expand gives the 32 bytes."""
        return AESGCM(hmac.digest(self._store_keys[key_id], id.encode() + b"\x01", "sha256"))
