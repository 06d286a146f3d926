"""A request after validation: parsed once, trusted afterwards. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import RequestId
from baton.domain.values.quick_init import quick_init
from baton.services.router.generation import MediaFile, SequenceSpec
from baton.services.router.openai.constraint.reader import RequestedConstraint
from baton.services.router.openai.reasoning.reader import RequestedReasoning
from baton.services.router.openai.tools.reader import RequestedTools


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a streamed response. A request without them gets a whole response."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class RequestedScores:
    """The scores of prompts that a response has, each with as many of the best tokens; None: they are not asked for.

    `echoed`: beside an echo, in `logprobs`. `listed`: in `prompt_logprobs`.
    """

    echoed: int | None = None
    listed: int | None = None

    @property
    def k(self) -> int:
        """Best tokens that a worker is asked for."""
        return max(self.echoed or 0, self.listed or 0)


@quick_init
@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A valid request to either endpoint.

    `prompts` hold token ids. `sequences` are the choices in the order of their index: `num_choices` for each prompt,
    one prompt after the other. The first choice of a prompt *leads*: the others start after its first token.

    A completion continues the text of its prompt. `echoes` are the texts that its choices begin with, "" without an
    echo. With `max_tokens` 0 (only an echo) there are no sequences; with scores there are, and what they sample is
    dropped (`drops_output`). `tokens_as_ids`: logprobs name tokens by their ids. `unknown_fields`: names that have no
    row in the table of fields; a client may send any. `include_stop`: a text ends with what stopped it. `constraint`:
    of every choice. `tools`: those that its choices may call. `reasoning`: how that of a chat is read.
    """

    id: RequestId
    model: str
    created_s: int
    prompts: tuple[tuple[int, ...], ...]
    sequences: tuple[SequenceSpec, ...]
    num_choices: int
    stop_strings: tuple[str, ...]
    skip_special_tokens: bool
    return_token_ids: bool
    stream_options: StreamOptions | None
    continues_prompt: bool = False
    echoes: tuple[str, ...] = ()
    unknown_fields: tuple[str, ...] = ()
    include_stop: bool = False
    constraint: RequestedConstraint | None = None
    tools: RequestedTools | None = None
    scores: RequestedScores | None = None
    drops_output: bool = False
    reasoning: RequestedReasoning | None = None
    tokens_as_ids: bool = False

    @property
    def files(self) -> tuple[MediaFile, ...]:
        """The files of its images; every choice has the same ones."""
        return self.sequences[0].files if self.sequences else ()

    @property
    def tenant(self) -> str:
        """The tenant that it belongs to; "" without API keys."""
        return self.sequences[0].tenant if self.sequences else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each counts once, whatever its number of choices."""
        return sum(map(len, self.prompts))

    @property
    def choices(self) -> range:
        """Indices of the choices."""
        return range(len(self.prompts) * self.num_choices)

    def leader(self, choice: int) -> int:
        """The choice that leads `choice`; a leader leads itself."""
        return choice - choice % self.num_choices
