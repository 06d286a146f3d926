"""A fingerprint names the part in which two workers differ, and trusts no peer's list of parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.fingerprint import MAX_PART_CHARS, MAX_PARTS, Fingerprint, FingerprintPart, digest_of

PARTS = (FingerprintPart("page_size", "16"), FingerprintPart("weights", "ab"))
OURS = Fingerprint(PARTS)


def test_the_order_of_parts_does_not_matter():
    assert Fingerprint(PARTS[::-1]).digest == OURS.digest
    assert OURS.difference(OURS.digest, PARTS[::-1]) is None


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_the_part_that_differs_is_named(number: int):
    other = list(PARTS)
    other[number] = replace(other[number], digest="x")
    theirs = Fingerprint(tuple(other))
    here = PARTS[number]
    assert OURS.difference(theirs.digest, theirs.parts) == f"{here.name}: {here.digest} here, x there"


def test_a_part_that_only_one_side_knows_is_a_difference():
    more = Fingerprint((*PARTS, FingerprintPart("adapters", "a")))
    assert OURS.difference(more.digest, more.parts) == "adapters: None here, a there"
    assert more.difference(OURS.digest, OURS.parts) == "adapters: a here, None there"


def test_another_page_format_is_named_before_all_other_parts():
    """Its other parts differ as well, and some have other names: the format explains them."""
    ours = Fingerprint((*PARTS, FingerprintPart("page_format", "2"), FingerprintPart("adapters", "none")))
    newer = Fingerprint((*PARTS, FingerprintPart("page_format", "3"), FingerprintPart("adapters", "other")))
    hint = "run one version of Baton on both"
    assert ours.difference(newer.digest, newer.parts) == f"page_format: 2 here, 3 there; {hint}"
    assert ours.difference(OURS.digest, OURS.parts) == f"page_format: 2 here, 1 there; {hint}"
    assert OURS.difference(ours.digest, ours.parts) == f"page_format: 1 here, 2 there; {hint}"


def test_an_older_peer_without_parts_is_compared_by_digest():
    assert OURS.difference(OURS.digest, ()) is None
    assert str(OURS.difference("0", ())).startswith("fingerprint: differs")


def test_equal_parts_under_another_digest_are_refused():
    assert OURS.difference("0", PARTS) == "fingerprint: differs from its own parts"


@pytest.mark.parametrize(
    "parts",
    [
        PARTS * MAX_PARTS,
        (FingerprintPart("n" * (MAX_PART_CHARS + 1), ""),),
        (FingerprintPart("n", "d" * (MAX_PART_CHARS + 1)),),
    ],
)
def test_oversized_parts_are_not_repeated_in_errors(parts: tuple[FingerprintPart, ...]):
    assert OURS.difference(OURS.digest, parts) == "fingerprint: not readable"


def test_framed_texts_cannot_be_shifted():
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
