"""Decode with page tags: chunks without fitting tags are a broken link, forged pages an integrity failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import PageId, WorkerId
from baton.engine.handoff.import_effects import AskVerdict
from baton.engine.messages import Fail
from baton.kv.keys import page_keys
from baton.kv.page_tags import TAG_BYTES, page_identities
from baton.services.decode.effects import DecodeEffect
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.kv_import import Reserved
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import PAGE_SIZE, TinyDecode, engine_request, tiny_decode

SOURCE = WorkerId("prefill-0")
REQUEST = engine_request("r", [0, 1, 1], salt="tenant")
TAGS = (b"a" * TAG_BYTES, b"b" * TAG_BYTES)
CHUNK = PublishedChunk(REQUEST.id, 0, (PageId(5), PageId(6)), (1, 2), TAGS)


class TaggedPolicy(ImportPolicy):
    def __init__(self, pool, imports, scheduler, rules: ImportRules, faults, growth) -> None:
        super().__init__(pool, imports, scheduler, replace(rules, tagged="m"), faults, growth)


def claimed(import_policy: type[ImportPolicy] = TaggedPolicy) -> TinyDecode:
    world = tiny_decode(True, num_host_pages=4, import_policy=import_policy)
    keys = page_keys(REQUEST.tokens, PAGE_SIZE, REQUEST.salt)
    answer, _ = world.import_policy.reserve(REQUEST.id, 3, keys, 0.0, 5.0)
    assert isinstance(answer, Reserved)
    assert world.import_policy.claim(answer.id, REQUEST, SOURCE, 9.0) == []
    return world


def pull_of(effects: list[DecodeEffect]) -> Pull:
    (pull,) = effects
    assert isinstance(pull, Pull)
    return pull


def test_a_read_has_the_tags_and_the_prompts_identities():
    pull = pull_of(claimed().import_policy.on_chunk(CHUNK, 1.0))
    assert pull.tags is not None
    assert tuple(one.tag for one in pull.tags) == TAGS
    assert [one.identity for one in pull.tags] == page_identities(REQUEST, PAGE_SIZE, "m")


@pytest.mark.parametrize(
    "tags", [None, TAGS[:1], (*TAGS, TAGS[0]), (TAGS[0], b"short")], ids=["none", "too few", "too many", "short"]
)
def test_missing_tags_are_a_broken_link(tags: tuple[bytes, ...] | None):
    effects = claimed().import_policy.on_chunk(replace(CHUNK, tags=tags), 1.0)
    (failure,) = [effect for effect in effects if isinstance(effect, Fail)]
    assert isinstance(failure.error, LinkBroken)
    assert "tags" in str(failure.error)


def test_without_the_rule_tags_are_ignored():
    pull = pull_of(claimed(ImportPolicy).import_policy.on_chunk(CHUNK, 1.0))
    assert pull.tags is None


def test_a_forged_page_is_read_again_with_its_tag_and_then_suspected():
    world = claimed()
    first = pull_of(world.import_policy.on_chunk(CHUNK, 1.0))
    corrupt = PullEvent(first, PullOutcome.CORRUPT, 0, 0.1, "", (1,))
    second = pull_of(world.import_policy.on_pull_event(corrupt, 2.0))
    assert first.tags is not None
    assert second.tags == [first.tags[1]]
    (ask,) = world.import_policy.on_pull_event(PullEvent(second, PullOutcome.CORRUPT, 0, 0.1, "", (0,)), 3.0)
    assert isinstance(ask, AskVerdict)
    assert [(one.index, one.page) for one in ask.suspects] == [(1, PageId(6))]
