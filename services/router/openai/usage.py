"""Counts a request's tokens for `usage`. `respond` keeps one meter a request."""

from __future__ import annotations

from services.router.openai.schemas import PromptTokensDetails, Usage
from services.router.openai.valid_request import ValidRequest
from services.router.text.choice_text import TokenEvent


class UsageMeter:
    """A prompt counts once for all its choices; its cached tokens are its leader's, as the others find it cached."""

    def __init__(self, request: ValidRequest) -> None:
        self._request = request
        self._num_output_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    def count(self, event: TokenEvent) -> None:
        """Adds one event."""
        self._num_output_tokens += event.token is not None
        if event.choice == self._request.leader(event.choice):
            self._num_cached_tokens[event.choice] = event.num_cached_tokens

    def usage(self) -> Usage:
        """The counts so far."""
        prompt, output = self._request.num_prompt_tokens, self._num_output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(sum(self._num_cached_tokens.values())))
