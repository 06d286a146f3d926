"""A client's request after validation: parsed once, trusted afterwards. Values only.

`validation` makes them, `token_stream` runs their sequences, `chat` and `completions` shape the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.ids import RequestId
from services.router.generation import SequenceSpec


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a streamed answer is wanted; a request without one is answered whole."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """What chats and completions have in common.

    `prompts` hold token ids. `sequences` are the choices in the order of their index: `num_choices` for every prompt,
    one prompt after the other. The first choice of a prompt *leads*: the others start after its first token.
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

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def choices(self) -> range:
        """Indices of the choices."""
        return range(len(self.prompts) * self.num_choices)

    def leader(self, choice: int) -> int:
        """The choice that leads `choice`; a leader leads itself."""
        return choice - choice % self.num_choices

    def context(self, choice: int) -> Sequence[int]:
        """Tokens whose text the choice's text goes on from; a chat's answer is a text of its own."""
        return ()


@dataclass(frozen=True, slots=True)
class ValidChatRequest(ValidRequest):
    """A request of /v1/chat/completions. The messages are in the one prompt."""


@dataclass(frozen=True, slots=True)
class ValidCompletionRequest(ValidRequest):
    """A request of /v1/completions. `echoes`: what each choice's text begins with, "" where no echo was asked.

    With `max_tokens` 0 (an echo and nothing else) there are no sequences.
    """

    echoes: tuple[str, ...]

    def context(self, choice: int) -> Sequence[int]:
        """The prompt."""
        return self.prompts[choice // self.num_choices]
