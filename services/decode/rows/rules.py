"""What decides about the rows of a decode worker beside its scheduler. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.drafts.policy import DraftPolicy
from baton.kv.growth import GrowthReserve
from baton.services.decode.rows.order import RowOrder


@dataclass(frozen=True, slots=True)
class RowRules:
    """`growth` learns from the rows; None: nothing learns. `drafts` None: no row has any. `order`: which gives way."""

    growth: GrowthReserve | None = None
    drafts: DraftPolicy | None = None
    order: RowOrder = field(default_factory=RowOrder)
