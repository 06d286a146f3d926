"""The needs of an attempt, and where earlier attempts of its request failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.domain.ids import Incarnation, PageKey
from baton.domain.request import EngineRequest
from baton.domain.values.quick_init import quick_init
from baton.domain.worker import NAMED_LOGPROBS, PROMPT_SCORES, TOKEN_BANS
from baton.services.router.dispatch.placement.pair import Pair


@dataclass(frozen=True, slots=True)
class Avoided:
    """Worker incarnations, and (prefill, decode) links, on which earlier attempts of a request failed."""

    workers: frozenset[Incarnation] = frozenset()
    links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()

    def with_worker(self, incarnation: Incarnation) -> Avoided:
        return Avoided(self.workers | {incarnation}, self.links)

    def with_link(self, pair: Pair) -> Avoided:
        return Avoided(self.workers, self.links | {pair.incarnations})

    def num_avoided(self, pair: Pair) -> int:
        """Counts the workers and links of the pair to avoid."""
        if not self.workers and not self.links:
            return 0
        return sum(incarnation in self.workers for incarnation in pair.incarnations) + (pair.incarnations in self.links)


@quick_init
@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """The needs of an attempt. `num_tokens` are to be prefilled; `max_tokens` bounds them and all output together.

    `keys`: page size -> keys of the full pages of the tokens. `busy`: decode workers that had no room just now.
    `fingerprint`, `grammars`: those that the workers must have; "" for any. `needs`: capabilities of both.
    `affinity`: a digest of the tenant and its `prompt_cache_key`; "" for none. `last`: the (prefill, decode) workers
    that had it last, if it is known. `processor`: digest of the image processor of a prompt with images; "" for text.
    `prefill`: the prefill worker that has begun the prompt; None: any may.
    """

    num_tokens: int
    max_tokens: int
    keys: Mapping[int, Sequence[PageKey]]
    avoided: Avoided = Avoided()
    busy: frozenset[Incarnation] = frozenset()
    fingerprint: str = ""
    grammars: str = ""
    needs: frozenset[str] = frozenset()
    affinity: str = ""
    last: tuple[Incarnation, Incarnation] | None = None
    processor: str = ""
    prefill: Incarnation | None = None


def needs_of(request: EngineRequest) -> frozenset[str]:
    """Capabilities without which a worker would ignore a part of the request."""
    needs = set()
    if request.prompt_logprobs is not None:
        needs.add(PROMPT_SCORES)
    if request.sampling.allowed_token_ids or request.sampling.bad_words:
        needs.add(TOKEN_BANS)
    if request.sampling.logprob_token_ids:
        needs.add(NAMED_LOGPROBS)
    return frozenset(needs)
