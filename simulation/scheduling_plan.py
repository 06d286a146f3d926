"""Settings of the simulated schedulers and caches that a scenario draws, beside those in `scenario`. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from baton.engine.chunking import ChunkPolicy
from baton.settings.choices import PageSharingKind
from baton.settings.tiers import TierWrite

DEFAULT_ROWS = 4


@dataclass(frozen=True, slots=True)
class SchedulingPlan:
    """As `PrefillSettings` and `DecodeSettings`; the defaults are those of a simulated cluster.

    `sharing`: whether imports and reads of tiers must pay. `chunking`: of decode workers that compute prompts.
    `file_write`: what prefill workers copy into files, which outlive them; None: they have none.
    """

    by_priority: bool = False
    oldest_prompt_share: float = 0.25
    max_partial_prompts: int = 2
    prefix_sharing: bool = True
    sharing: PageSharingKind = PageSharingKind.ALWAYS
    chunking: ChunkPolicy = ChunkPolicy.FIXED
    growth_clip_tokens: int = 8
    max_reservations: int = DEFAULT_ROWS
    file_write: TierWrite | None = None


DEFAULT_SCHEDULING = SchedulingPlan()


def draw_scheduling(rng: Random, *, digests: bool) -> SchedulingPlan:
    """Each setting by itself. A copy in a file needs a digest."""
    return SchedulingPlan(
        by_priority=rng.random() < 0.5,
        oldest_prompt_share=rng.choice([0.0, 0.25, 0.5, 1.0]),
        max_partial_prompts=rng.choice([1, 2, 4]),
        prefix_sharing=rng.random() < 0.75,
        sharing=rng.choice([PageSharingKind.ALWAYS, PageSharingKind.CHEAPER]),
        chunking=rng.choice(list(ChunkPolicy)),
        growth_clip_tokens=rng.choice([1, 4, 8, 16]),
        max_reservations=rng.choice([1, 2, DEFAULT_ROWS]),
        file_write=rng.choice([*TierWrite, None]) if digests else None,
    )
