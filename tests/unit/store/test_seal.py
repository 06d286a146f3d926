"""A sealed blob opens in its own place, with a valid secret, unchanged; nowhere else."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.trust import ClusterTrust
from baton.store.seal import SealedKind, SealError, SealFault, StoreSeal

OLD, NEW = b"o" * 32, b"n" * 32
OURS = StoreSeal("baton:", ClusterTrust(OLD))
BLOB = OURS.seal(SealedKind.CALL, "call-1", b"the prompt of a client")


def fault(seal: StoreSeal, blob: bytes, kind: SealedKind = SealedKind.CALL, id: str = "call-1") -> SealFault:
    with pytest.raises(SealError) as refused:
        seal.open(kind, id, blob)
    return refused.value.fault


@given(st.binary(max_size=300), st.text(max_size=20), st.sampled_from(SealedKind))
def test_a_blob_opens_to_its_payload(payload: bytes, id: str, kind: SealedKind):
    blob = OURS.seal(kind, id, payload)
    assert OURS.open(kind, id, blob) == payload
    assert len(payload) < 8 or payload not in blob
    assert OURS.seal(kind, id, payload) != blob  # a new nonce each time


def test_a_blob_opens_in_its_own_place_only():
    assert fault(OURS, BLOB, id="call-2") is SealFault.FORGED
    assert fault(OURS, BLOB, kind=SealedKind.TRACE) is SealFault.FORGED
    assert fault(StoreSeal("other:", ClusterTrust(OLD)), BLOB) is SealFault.FORGED


@pytest.mark.parametrize("bit", range(0, 8 * len(BLOB), 5))
def test_no_changed_bit_opens(bit: int):
    changed = bytearray(BLOB)
    changed[bit // 8] ^= 1 << bit % 8
    assert fault(OURS, bytes(changed)) in SealFault


@pytest.mark.parametrize("length", range(len(BLOB)))
def test_nothing_cut_short_opens(length: int):
    assert fault(OURS, BLOB[:length]) in (SealFault.FORGED, SealFault.UNREADABLE)
    assert fault(OURS, BLOB[-length:] if length else b"") is not None


def test_what_is_not_sealed_does_not_open_in_a_cluster_with_a_secret():
    clear = StoreSeal("baton:").seal(SealedKind.CALL, "call-1", b"forged")
    assert StoreSeal("baton:").open(SealedKind.CALL, "call-1", clear) == b"forged"
    assert fault(OURS, clear) is SealFault.CLEAR
    assert fault(StoreSeal("baton:"), BLOB) is SealFault.UNKNOWN_KEY


def test_in_a_rotation_the_first_secret_seals_and_both_open():
    added = StoreSeal("baton:", ClusterTrust(OLD, second_secret=NEW))
    swapped = StoreSeal("baton:", ClusterTrust(NEW, second_secret=OLD))
    removed = StoreSeal("baton:", ClusterTrust(NEW))
    new_blob = swapped.seal(SealedKind.CALL, "call-1", b"later")
    for seal in (added, swapped):
        assert seal.open(SealedKind.CALL, "call-1", BLOB) == b"the prompt of a client"
        assert seal.open(SealedKind.CALL, "call-1", new_blob) == b"later"
    assert OURS.open(SealedKind.CALL, "call-1", added.seal(SealedKind.CALL, "call-1", b"x")) == b"x"
    assert removed.open(SealedKind.CALL, "call-1", new_blob) == b"later"
    assert fault(removed, BLOB) is SealFault.UNKNOWN_KEY


def test_the_key_of_an_id_is_hkdf_and_the_cipher_aes_256_gcm():
    key = HKDFExpand(SHA256(), 32, b"call-1").derive(ClusterTrust(OLD).key("store") or b"")
    payload = AESGCM(key).decrypt(BLOB[5:17], BLOB[17:], b"\x93\xa4call\xa6baton:\xa6call-1")
    assert payload == b"the prompt of a client"
