"""Page tags: who does not hold the secret cannot forge a page, and a valid pair fits no other page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.media.span import MediaSpan
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.keys import page_keys
from baton.kv.memory import PageMemory
from baton.kv.page_tags import (
    NONCE_BYTES,
    PURPOSE,
    TAG_BYTES,
    PageTag,
    PoolTagger,
    TagVerifier,
    join_tags,
    page_identities,
    split_tags,
)
from baton.transfer.base import Pull
from baton.transfer.digest import digest_pages, wrong_positions
from tests.tiny_workers import engine_request

OLD, NEW, FOREIGN = (name * 32 for name in (b"o", b"n", b"f"))
TRUST = ClusterTrust(OLD)
PAGES = (PageId(0), PageId(1), PageId(2))
TOKENS = (1, 2, 3, 4, 5)  # two full pages of 2 and a tail


def tagger(memory: PageMemory, trust: ClusterTrust = TRUST) -> PoolTagger:
    key = trust.key(PURPOSE)
    assert key is not None
    return PoolTagger(memory, key, Incarnation(9))


def pool(part_ends: tuple[int, ...] = ()) -> PageMemory:
    memory = PageMemory(3, 64, part_ends)
    memory.buffer[:] = bytes(range(192))
    return memory


def wrong(memory: PageMemory, tags: list[bytes], identities: list[bytes], trust: ClusterTrust = TRUST) -> list[int]:
    """Positions that do not fit; the digests are recomputed, as a forger would."""
    pairs = [PageTag(*pair) for pair in zip(identities, tags, strict=True)]
    pull = Pull(1, WorkerId("p"), PAGES, PAGES, digest_pages(memory, PAGES), 1.0, pairs)
    return wrong_positions(memory, pull, slice(0, 3), TagVerifier(trust), {})


def identities(
    tokens: tuple[int, ...] = TOKENS, salt: str = "", model: str = "m", media: tuple[MediaSpan, ...] = ()
) -> list[bytes]:
    return page_identities(replace(engine_request("r", list(tokens), salt=salt), media=media), 2, model)


def test_a_true_page_fits():
    memory = pool()
    tags = tagger(memory).tags(PAGES, identities())
    assert wrong(memory, tags, identities()) == []
    assert {len(tag) for tag in tags} == {TAG_BYTES}


@pytest.mark.parametrize("page", range(3))
def test_forged_bytes_do_not_fit_though_their_digest_does(page: int):
    memory = pool()
    tags = tagger(memory).tags(PAGES, identities())
    memory.page(page)[63] ^= 1
    assert wrong(memory, tags, identities()) == [page]


def test_a_changed_nonce_or_authenticator_does_not_fit():
    memory = pool()
    first, second, third = tagger(memory).tags(PAGES, identities())
    changed = [first[:NONCE_BYTES] + second[NONCE_BYTES:], second[:-1], third[:-1] + bytes([third[-1] ^ 1])]
    assert wrong(memory, changed, identities()) == [0, 1, 2]


def test_a_replayed_pair_of_another_page_does_not_fit():
    memory = pool()
    tags = tagger(memory).tags(PAGES, identities())
    memory.page(1)[:] = memory.page(0)
    assert wrong(memory, [tags[0], tags[0], tags[2]], identities()) == [1]


def test_every_part_has_a_tag_that_fits_no_other_part():
    memory = pool(part_ends=(16, 32, 64))
    memory.page(1)[16:32] = memory.page(1)[:16]  # so that only the number tells the first two parts apart
    tags = tagger(memory).tags(PAGES, identities())
    assert wrong(memory, tags, identities()) == []
    assert {len(tag) for tag in tags} == {3 * TAG_BYTES}
    first, second, third = split_tags([tags[1]])
    swapped, short = second + first + third, first + second
    assert wrong(memory, [tags[0], swapped, tags[2]], identities()) == [1]
    assert wrong(memory, [tags[0], short, tags[2]], identities()) == [1]
    for byte in (0, 16, 63):
        memory.page(2)[byte] ^= 1
        assert wrong(memory, tags, identities()) == [2]
        memory.page(2)[byte] ^= 1


def test_tags_of_parts_are_joined_page_by_page_and_split_again():
    parts = [bytes([number]) * TAG_BYTES for number in range(6)]
    assert [len(tag) for tag in join_tags(parts, 3)] == [3 * TAG_BYTES] * 2
    assert split_tags(join_tags(parts, 3)) == parts


def test_a_replayed_tail_of_other_tokens_does_not_fit():
    memory = pool()
    tags = tagger(memory).tags(PAGES, identities())
    assert wrong(memory, tags, identities((1, 2, 3, 4, 6))) == [2]
    assert wrong(memory, tags, identities((9, 2, 3, 4, 5))) == [0, 1, 2], "a tail is bound to all tokens before it"


def test_tags_of_another_salt_or_model_do_not_fit():
    memory = pool()
    tags = tagger(memory).tags(PAGES, identities())
    assert wrong(memory, tags, identities(salt="tenant")) == [0, 1, 2]
    assert wrong(memory, tags, identities(model="n")) == [0, 1, 2]


def test_tags_of_another_cluster_do_not_fit():
    memory = pool()
    tags = tagger(memory, ClusterTrust(FOREIGN)).tags(PAGES, identities())
    assert wrong(memory, tags, identities()) == [0, 1, 2]
    assert wrong(memory, tags, identities(), OPEN_CLUSTER) == [0, 1, 2], "no key verifies nothing"


@pytest.mark.parametrize("decode", [ClusterTrust(OLD, None, NEW), ClusterTrust(NEW, None, OLD)])
def test_both_secrets_of_a_rotation_fit(decode: ClusterTrust):
    memory = pool()
    for trust in (ClusterTrust(OLD, None, NEW), ClusterTrust(NEW, None, OLD)):
        assert wrong(memory, tagger(memory, trust).tags(PAGES, identities()), identities(), decode) == []
    assert wrong(memory, tagger(memory).tags(PAGES, identities()), identities(), ClusterTrust(NEW)) == [0, 1, 2]


def test_no_nonce_comes_twice():
    memory = pool()
    source = tagger(memory)
    source._count = (1 << 32) - 2
    nonces = [tag[:NONCE_BYTES] for _ in range(2) for tag in source.tags(PAGES, identities())]
    assert len(set(nonces)) == 6
    assert nonces[1][:8] != nonces[2][:8], "a used up counter goes on under another number"


def test_full_pages_bind_their_page_keys():
    assert [one[:16] for one in identities()[:2]] == page_keys(TOKENS, 2, "")
    assert len(identities()) == 3
    assert len(identities((1,))) == 1


def test_a_partial_page_of_another_image_has_another_identity():
    red, blue = (identities(media=(MediaSpan(4, 1, name * 16),)) for name in (b"r", b"b"))
    assert red[:2] == blue[:2] == identities()[:2]
    assert len({red[2], blue[2], identities()[2]}) == 3
