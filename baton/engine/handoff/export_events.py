"""Events of a KV export, from the engine to the handoff's watchers and to the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId
from baton.domain.request import FinishReason, SampledToken
from baton.domain.timing.attempt_times import PrefillTimes
from baton.domain.worker import WorkerRole


@dataclass(frozen=True, slots=True)
class Seal:
    """Seal of a prompt: the last chunk is published and the first token, of output index `index`, is sampled.

    Of the cached tokens `num_from_tiers` were read from tiers below the pool, by their names, and `num_imported` from
    other workers, by their role.
    """

    id: AttemptId
    index: int
    first_token: SampledToken
    finish: FinishReason | None
    num_pages: int
    times: PrefillTimes
    num_from_tiers: Mapping[str, int] = field(default_factory=dict)
    num_imported: Mapping[WorkerRole, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportExpired:
    """End of a sealed export whose lease ran out before the commit."""

    id: AttemptId


@dataclass(frozen=True, slots=True)
class ExportEnded:
    """End of an export by commit or abort. Its events are not needed any more."""

    id: AttemptId
    reason: str
