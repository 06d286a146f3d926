"""Events of a KV export, from the engine to the handoff's watchers and to the router."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import AttemptId
from baton.domain.request import FinishReason, SampledToken
from baton.domain.timing.attempt_times import PrefillTimes


@dataclass(frozen=True, slots=True)
class Seal:
    """Seal of a prompt: the last chunk is published and the first token, of output index `index`, is sampled.

    `num_from_file`: those of the cached tokens that were read from the file tier.
    """

    id: AttemptId
    index: int
    first_token: SampledToken
    finish: FinishReason | None
    num_pages: int
    times: PrefillTimes
    num_from_file: int = 0


@dataclass(frozen=True, slots=True)
class ExportExpired:
    """End of a sealed export whose lease ran out before the commit."""

    id: AttemptId


@dataclass(frozen=True, slots=True)
class ExportEnded:
    """End of an export by commit or abort. Its events are not needed any more."""

    id: AttemptId
    reason: str
