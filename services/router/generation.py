"""The interface between the router's HTTP side, which knows text, and `dispatch`, which knows tokens. No behaviour.

The HTTP side makes a `SequenceSpec` for each choice of a request and turns `TokenChunk`s into text. `dispatch` admits a
sequence, places it, runs its attempts and yields its tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from baton.domain.constraint import Constraint
from baton.domain.ids import RequestId
from baton.domain.media.span import MediaGrid, MediaSpan
from baton.domain.request import FinishReason, OutputToken, SamplingParams, StopParams
from baton.domain.scores.prompt_scores import PromptScores
from baton.domain.values.quick_init import quick_init
from baton.telemetry.sequence_timer import SequenceTimer


@dataclass(frozen=True, slots=True)
class MediaFile:
    """One image of a sequence, for the worker that encodes it. `num_rows` and `grid`: of its embedding, as counted.

    `data` is the file, of `num_bytes`; None if this router does not have it, because another one began the request.
    `processor`: digest of the image processor that the rows were counted for. `param`: the image's place in the body.
    """

    identity: bytes
    data: bytes | None = field(repr=False)
    num_bytes: int
    processor: str
    detail: str
    num_rows: int
    grid: MediaGrid | None
    param: str


@quick_init
@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to generate, validated. `deadline_s` counts from admission.

    A sequence that was taken over brings the tokens emitted before (`dispatch` yields only what follows), the number of
    prompt tokens cached then, the attempt and owner tag that the store has opened for it, and the fingerprint of its
    last workers. Only workers with that fingerprint may continue: a client may have heard tokens that are not in the
    store.

    `prompt_logprobs`: as many best tokens are scored at each position of the prompt; None: nothing is. The scores come
    with the first chunk.

    `tenant` is "" without API keys. A higher `priority` comes first within a tenant. Only workers with this router's
    grammar library run a sequence with a `constraint`. Sequences of one `affinity` prefer the same workers, and "" is
    none. `media`: spans of the prompt, in order. `files`: of the images that they show; one may come twice.
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
    tenant: str = ""
    priority: int = 0
    owner_tag: int = 0
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    affinity: str = ""
    media: tuple[MediaSpan, ...] = ()
    files: tuple[MediaFile, ...] = ()

    @property
    def processor(self) -> str:
        """Digest of the image processor of its files; "" without files."""
        return self.files[0].processor if self.files else ""


class TokenChunk(Struct, frozen=True):
    """Tokens in order, without gap or duplicate. `finish` comes with the last one.

    `num_cached_tokens`: prompt tokens that were in a prefix cache, of prefill or decode. `prompt_scores`: come with the
    first tokens, if they were asked for.
    """

    tokens: tuple[OutputToken, ...]
    num_cached_tokens: int
    finish: FinishReason | None = None
    prompt_scores: PromptScores | None = None


TakeChunk = Callable[[TokenChunk], bool]
"""Takes a chunk at once, without a wait, and returns True; or returns False and leaves the chunk as it is."""


class AdmittedRequest(Protocol):
    """A sequence from `admit` to the end of `run`."""

    @property
    def sequence(self) -> SequenceSpec: ...

    def complete(self) -> None:
        """Ends the sequence as finished with the tokens yielded so far (a stop string matched). Closing `run` then
        aborts its workers without cancelling it. No effect after the end."""
        ...


class Dispatcher(Protocol):
    """Runs sequences. Implemented by `dispatch`, and by a scripted fake for tests."""

    def refuse_if_full(self, deadline_s: float, tenant: str = "") -> None:
        """Raises `Overloaded` if no sequence of `tenant` with that deadline can be admitted now, however short.

        Cheap: call it before a body is read, parsed and tokenised.
        """
        ...

    async def reserve_rates(self, tenant: str, sequences: Sequence[SequenceSpec]) -> None:
        """Reserves one request with these sequences in the tenant's rates. Raises `Overloaded`.

        What a sequence does not use is given back at its end, or by `forgo`.
        """
        ...

    def forgo(self, sequences: Sequence[SequenceSpec]) -> None:
        """Gives back the reserved rates of those of `sequences` that were not admitted. Idempotent."""
        ...

    def admit(self, sequence: SequenceSpec, timer: SequenceTimer) -> AdmittedRequest:
        """Admits a sequence, and stamps its timer until its run ends.

        Raises `Refused` (`Overloaded`, `NoWorkers`, `Draining`, `ContextOverflow`) at once.
        """
        ...

    def release(self, admitted: AdmittedRequest) -> None:
        """Releases a sequence that was never run. Idempotent."""
        ...

    def run(self, admitted: AdmittedRequest, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        """Yields chunks until `finish`. Raises `Interrupted` (retries exhausted), `DeadlineExceeded` or `Broken`.

        `take`: is offered chunks that come while the next one is waited for; those that it takes are not yielded. So a
        token costs no task switch. It must not raise. The last chunk is always yielded.

        Closing or cancelling it aborts the sequence on every worker and frees its slot.
        """
        ...
