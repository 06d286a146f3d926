"""Tokens of a step in flight as the host sees them: which row samples them, not which they are. Pure.

A scheduler that builds a step while the one before it runs puts a `FutureToken` where the token would be. The runner
fills it in on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from baton.domain.errors import Broken
from baton.domain.request import EngineRequest, banned_tokens

UNREAD_TOKEN = -1
"""Place of a future token in `Row.tokens`. No token id."""


@dataclass(frozen=True, slots=True)
class FutureToken:
    """The token that row `row` of the step started just before samples."""

    row: int


class UnreadHistory(Sequence[int]):
    """`tokens`, as long as they are now, and one behind them that a step in flight samples.

    Its length, the position of the next token, is known. Reading the last token raises `Broken`.
    """

    __slots__ = ("_num_known", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._num_known = tokens, len(tokens)

    @property
    def known(self) -> Sequence[int]:
        """The tokens without the last one."""
        return self._tokens[: self._num_known]

    def __len__(self) -> int:
        return self._num_known + 1

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._tokens[self._checked(places)]
        return [self._tokens[self._checked(place)] for place in places]

    def _checked(self, place: int) -> int:
        if place >= self._num_known:
            raise Broken(f"token {place} was read before the step that samples it has ended")
        return place


def needs_known_tokens(request: EngineRequest, num_output_tokens: int) -> bool:
    """True if the token after `num_output_tokens` outputs is sampled with the host's help, which needs all before it.

    Masks, penalties, bans and biases are worked out on the host. Log probabilities are read by it after the step.
    """
    sampling = request.sampling
    return bool(
        request.constraint is not None
        or sampling.logprobs is not None
        or sampling.logit_bias
        or sampling.bad_words
        or sampling.allowed_token_ids
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or banned_tokens(request.stop, num_output_tokens)
    )
