"""The identity of an image changes with each of the things that its embedding depends on."""

from __future__ import annotations

from baton.domain.media.identity import MediaHasher, media_identity


def test_file_processor_and_detail_give_other_identities():
    found = {
        media_identity(b"file", "p"),
        media_identity(b"fil", "p"),
        media_identity(b"file", "q"),
        media_identity(b"file", "p", "low"),
        media_identity(b"lowfile", "p"),
    }
    assert len(found) == 5
    assert {len(one) for one in found} == {16}


def test_only_low_detail_counts():
    assert media_identity(b"file", "p", "high") == media_identity(b"file", "p", "auto") == media_identity(b"file", "p")


def test_a_file_in_parts_has_the_same_identity():
    hasher = MediaHasher("p", "low")
    for part in (b"fi", b"", b"le"):
        hasher.update(part)
    assert hasher.identity() == media_identity(b"file", "p", "low")


def test_the_identity_is_a_constant_of_the_protocol():
    assert media_identity(b"file", "p").hex() == "df707f27d84d12f1ac65e54f9ac70f9d"
