"""Prefill's page tags: made when a page settles, kept with it, and bound to the prompt's tokens."""

from __future__ import annotations

from baton.domain.handoff import PublishedChunk
from baton.domain.ids import Incarnation
from baton.domain.request import EngineRequest
from baton.domain.trust import ClusterTrust
from baton.engine.handoff.prompt_tags import PromptTags
from baton.kv.page_checks import PageChecks
from baton.kv.page_tags import PURPOSE, PageTag, PoolTagger, TagVerifier, page_identities
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.scheduler import PrefillScheduler
from tests.tiny_workers import PAGE_SIZE, TinyPrefill, engine_request, tiny_prefill

TRUST = ClusterTrust(b"s" * 32)
PROMPT = [0, 1, 1, 0, 1]  # two full pages and a tail


class Tagged:
    def __init__(self) -> None:
        self.world: TinyPrefill = tiny_prefill(5.0)
        key = TRUST.key(PURPOSE)
        assert key is not None
        cache = self.world.cache
        tags = PromptTags(cache.pool.digests, PoolTagger(self.world.memory, key, Incarnation(1)), PAGE_SIZE, "m")
        limits = PrefillLimits(PAGE_SIZE, 2 * PAGE_SIZE, 2, 8)
        self.scheduler = PrefillScheduler(cache, self.world.exports, limits, PageChecks(cache), tags)

    def run(self, request: EngineRequest, num_at_decode: int = 0) -> list[PublishedChunk]:
        self.scheduler.add(request, num_at_decode, 9.0)
        effects = []
        while batch := self.scheduler.schedule(0.0):
            effects += self.scheduler.commit(batch, self.world.runner.run(batch), 0.0)
        return [effect for effect in effects if isinstance(effect, PublishedChunk)]

    def fits(self, chunk: PublishedChunk, request: EngineRequest) -> list[bool]:
        assert chunk.tags is not None
        identities = page_identities(request, PAGE_SIZE, "m")[chunk.first_page :]
        contents, verifier = self.world.memory.read(chunk.pages), TagVerifier(TRUST)
        return [verifier.fits([c], PageTag(i, t)) for c, i, t in zip(contents, identities, chunk.tags, strict=False)]


def test_every_published_page_has_a_tag_that_fits():
    tagged, request = Tagged(), engine_request("r", PROMPT)
    first, last = tagged.run(request)
    assert [len(chunk.tags or ()) for chunk in (first, last)] == [2, 1]
    assert tagged.fits(first, request) + tagged.fits(last, request) == [True] * 3
    assert tagged.fits(first, engine_request("r", PROMPT, salt="other")) == [False, False]


def test_a_cached_page_is_published_with_its_kept_tag():
    tagged = Tagged()
    first, _ = tagged.run(engine_request("r", PROMPT))
    again = tagged.run(engine_request("s", [*PROMPT, 0, 1]))
    assert first.tags is not None
    assert sum((chunk.tags or () for chunk in again), ())[:2] == first.tags


def test_damage_after_settling_is_not_tagged_anew():
    """Pages that decode had are tagged when they settle, not when another decode worker asks for them."""
    tagged, request = Tagged(), engine_request("r", PROMPT)
    tagged.run(request, num_at_decode=2 * PAGE_SIZE)
    digests = tagged.world.cache.pool.digests
    pages = [page for page in range(8) if digests.is_settled(page)]  # type: ignore[arg-type]
    assert len(pages) == 2
    assert all(digests.tag(page) for page in pages)  # type: ignore[arg-type]


def test_a_freed_page_forgets_its_tag():
    tagged = Tagged()
    tagged.run(engine_request("r", PROMPT))
    digests = tagged.world.cache.pool.digests
    assert tagged.world.exports.commit(engine_request("r", PROMPT).id)
    tagged.world.cache.clear()
    assert not any(digests.tag(page) for page in range(8))  # type: ignore[arg-type]
