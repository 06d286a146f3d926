"""What a prefill scheduler shares cached pages with: tiers below the pool, and other workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.handoff.cached_exports import CachedExports
from baton.engine.handoff.page_imports import PageImports
from baton.kv.tiers.lower_tier import LowerTier


@dataclass(frozen=True, slots=True)
class PageSharing:
    """`tier`: where more cached pages are read from. `imports`: from other workers' caches. `exports`: to them.

    None: there is none.
    """

    tier: LowerTier | None = None
    imports: PageImports | None = None
    exports: CachedExports | None = None
