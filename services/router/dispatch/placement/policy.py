"""Policies of placement: what counts in the choice of a role's worker, and which workers are asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord
from baton.services.router.dispatch.placement.pair import Pair


class PlacementPolicy(StrEnum):
    """How the worker of one role is chosen among those that can take a request.

    `CACHE_AWARE`: the least work, by what it has cached, what waits there and, at decode, its rows. `LEAST_LOAD`: the
    same as if nothing were cached. `TWO_CHOICES`: the less loaded of two random ones (power of two choices,
    Mitzenmacher 2001). `ROUND_ROBIN`: in turns.
    """

    CACHE_AWARE = "cache-aware"
    LEAST_LOAD = "least-load"
    TWO_CHOICES = "two-choices"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The policies of both roles."""

    prefill: PlacementPolicy = PlacementPolicy.CACHE_AWARE
    decode: PlacementPolicy = PlacementPolicy.CACHE_AWARE

    def narrow(self, pairs: Sequence[Pair], number: int) -> list[Pair]:
        """The pairs whose workers are asked for placement `number`: at least one of `pairs`, which are not empty.

        Prefill workers are narrowed first, and decode workers among those linked to one that is left.
        """
        num_prefills = len({pair.prefill.incarnation for pair in pairs})
        left = _narrow(pairs, self.prefill, number, random.Random(2 * number), lambda pair: pair.prefill)
        if self.prefill is PlacementPolicy.ROUND_ROBIN:
            number //= num_prefills  # the decode workers of each prefill worker take turns of their own
        return _narrow(left, self.decode, number, random.Random(2 * number + 1), lambda pair: pair.decode)


BY_CACHE = PlacementRules()


def _narrow(
    pairs: Sequence[Pair],
    policy: PlacementPolicy,
    number: int,
    rng: random.Random,
    worker: Callable[[Pair], WorkerRecord],
) -> list[Pair]:
    """The pairs whose `worker` is asked."""
    if policy in (PlacementPolicy.CACHE_AWARE, PlacementPolicy.LEAST_LOAD):
        return list(pairs)
    ids: dict[Incarnation, WorkerId] = {worker(pair).incarnation: worker(pair).id for pair in pairs}
    ordered = sorted(ids, key=lambda incarnation: (ids[incarnation], incarnation))
    if policy is PlacementPolicy.ROUND_ROBIN:
        asked = {ordered[number % len(ordered)]}
    else:
        asked = set(rng.sample(ordered, min(2, len(ordered))))
    return [pair for pair in pairs if worker(pair).incarnation in asked]
