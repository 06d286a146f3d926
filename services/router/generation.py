"""The seam inside the router: text above (`api`), tokens below (`dispatch`). Values and one interface, no behaviour.

`api` validates a client's call into `SequenceSpec`s (one a choice) and turns `TokenChunk`s into text; `dispatch`
admits a sequence, places it, drives its attempts and yields its tokens. Neither knows the other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import RequestId
from baton.domain.request import FinishReason, OutputToken, SamplingParams, StopParams
from baton.telemetry.request_timer import SequenceTimer


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to generate, parsed once and trusted afterwards. `deadline_s` counts from admission.

    A sequence that was taken over brings the tokens emitted before (`dispatch` yields only what follows), the number of
    prompt tokens cached then, the attempt that the store has opened for it, and the fingerprint of its last workers.
    Only workers with that fingerprint may continue: a client may have heard tokens that are not in the store.
    """

    id: RequestId
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    salt: str
    deadline_s: float
    attempt: int = 1
    emitted: tuple[OutputToken, ...] = ()
    num_cached_tokens: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens in order, without gap or duplicate; `finish` comes with the last.

    `num_cached_tokens` is known from the first chunk on: prompt tokens found in a prefix cache on either side.
    """

    tokens: tuple[OutputToken, ...]
    num_cached_tokens: int
    finish: FinishReason | None = None


class AdmittedRequest(Protocol):
    """A place at the door, held from `admit` to the end of `run`."""

    @property
    def sequence(self) -> SequenceSpec: ...

    def complete(self) -> None:
        """The text is complete with what `run` has given (a stop string was met): closing it now is an end, not an
        abort. No effect after the end."""
        ...


class Dispatcher(Protocol):
    """The router's lower half as its upper half sees it."""

    def refuse_if_full(self, deadline_s: float) -> None:
        """Raises `Overloaded` if a sequence of that deadline would not be taken now, however short its prompt.

        Costs next to nothing: to be asked before a body is read, parsed and made into tokens.
        """
        ...

    def admit(self, sequence: SequenceSpec, timer: SequenceTimer) -> AdmittedRequest:
        """Takes the sequence, and stamps its timer until its run ends.

        Raises `Refused` (`Overloaded`, `NoWorkers`, `Draining`, `ContextOverflow`) at once.
        """
        ...

    def release(self, admitted: AdmittedRequest) -> None:
        """Gives back an admitted sequence that was never run; idempotent."""
        ...

    def run(self, admitted: AdmittedRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yields chunks until `finish`. Raises `Interrupted` (retries exhausted), `DeadlineExceeded` or `Broken`.

        Closing or cancelling it in any phase aborts the request on every worker and frees its slot.
        """
        ...
