"""Generation from Python in one process: `LLM(model).generate(prompts)`.

Text goes through the router's tokenizer and detokenizer, tokens through both engines of a `LocalPair`. For debugging
and tests; it serves nobody else meanwhile.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId
from baton.domain.request import FinishReason, SamplingParams, StopParams
from baton.domain.scores.prompt_scores import ScoredToken
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from baton.services.local.pair import LocalPair, PairLimits
from baton.services.router.generation import TokenChunk
from baton.services.router.text.choice_text import ChoiceText
from baton.services.router.text.text_model import TextModel
from baton.settings.model_source import resolve_model

DEFAULT_MAX_TOKENS = 128
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class LocalToken:
    """A token of prompt number `prompt` and the text that became certain with it; `finish` comes with the last."""

    prompt: int
    token: int | None
    text: str
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class LocalCompletion:
    """The whole answer to one prompt."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish: FinishReason


class LLM:
    """A model split into prefill and decode inside this process. `pair` is public: set breakpoints there."""

    def __init__(
        self,
        model: str | Path = "bundled",
        *,
        dtype: DtypeChoice = DtypeChoice.AUTO,
        page_size: int = 16,
        head_groups: int = 1,
        limits: PairLimits | None = None,
    ) -> None:
        """`model`: `bundled`, a directory or a Hugging Face id. Raises `UnreadableModel` or `UnsupportedModel`."""
        directory = resolve_model(str(model))
        loaded = load_model(directory, dtype=dtype, page_size=page_size, head_groups=head_groups)
        self.text = TextModel.load(directory)
        self.pair = LocalPair(loaded, limits or PairLimits())
        self._max_model_len = loaded.config.max_model_len

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None, *,
        stop: StopParams | None = None, stream: Literal[False] = False,
    ) -> list[LocalCompletion]: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None, *,
        stop: StopParams | None = None, stream: Literal[True],
    ) -> Iterator[LocalToken]: ...  # fmt: skip

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        stop: StopParams | None = None,
        stream: bool = False,
    ) -> list[LocalCompletion] | Iterator[LocalToken]:
        """Completes every prompt, text or token ids, in one continuous batch.

        `sampling` defaults to the model's own with a random seed, `stop` to the model's end tokens and
        `DEFAULT_MAX_TOKENS`. With `stream` tokens are yielded as they come. Raises `BatonError`.
        """
        encoded = self._encode(prompts)
        stream_of_tokens = self._stream(encoded, sampling or self.default_sampling(), stop)
        return stream_of_tokens if stream else self._collect(encoded, stream_of_tokens)

    def score(self, prompts: Prompt | Sequence[Prompt], k: int = 0) -> list[list[ScoredToken]]:
        """Scores each token of every prompt but the first, with the `k` best beside it. Raises `BatonError`."""
        scored = []
        for prompt in self._encode(prompts):
            self.pair.submit(prompt, SamplingParams(temperature=0.0), StopParams(1), prompt_logprobs=k)
            found = next((part.scores for part in self.pair.run() if part.scores is not None), None)
            scored.append([] if found is None else found.tokens(k))
        return scored

    def default_sampling(self) -> SamplingParams:
        """The model's recommended parameters, with a random seed."""
        defaults = self.text.sampling_defaults
        return SamplingParams(
            temperature=defaults.temperature, top_k=defaults.top_k, top_p=defaults.top_p, min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty, seed=random.getrandbits(63),
        )  # fmt: skip

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[tuple[int, ...]]:
        is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: Sequence[Prompt] = [prompts] if is_single else prompts  # type: ignore[list-item,assignment]
        return [
            self.text.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else tuple(prompt)
            for prompt in many
        ]

    def _stream(
        self, prompts: list[tuple[int, ...]], sampling: SamplingParams, stop: StopParams | None
    ) -> Iterator[LocalToken]:
        waiting = deque(enumerate(prompts))
        live: dict[AttemptId, ChoiceText] = {}
        try:
            while waiting or live:
                while waiting:
                    index, prompt = waiting[0]
                    limit = stop or self._default_stop(prompt)
                    id = self.pair.submit(prompt, sampling, limit)
                    if id is None and live:
                        break  # a finished request makes room
                    if id is None:
                        raise Broken("an idle decode engine has no room")
                    live[id] = ChoiceText(index, limit, self.text.detokenizer(skip_special_tokens=True), ())
                    waiting.popleft()
                for part in self.pair.run():
                    for event in live[part.id].events(TokenChunk(part.tokens, 0, part.finish)):
                        token = None if event.token is None else event.token.token
                        yield LocalToken(event.choice, token, event.text, event.finish)
                    if part.finish is not None:
                        del live[part.id]
        finally:
            self.pair.abort()

    def _default_stop(self, prompt: tuple[int, ...]) -> StopParams:
        room = self._max_model_len - len(prompt)
        return StopParams(max(1, min(DEFAULT_MAX_TOKENS, room)), stop_token_ids=self.text.eos_token_ids)

    def _collect(self, prompts: list[tuple[int, ...]], events: Iterator[LocalToken]) -> list[LocalCompletion]:
        tokens: list[list[int]] = [[] for _ in prompts]
        texts: list[list[str]] = [[] for _ in prompts]
        finishes: dict[int, FinishReason] = {}
        for event in events:
            if event.token is not None:
                tokens[event.prompt].append(event.token)
            texts[event.prompt].append(event.text)
            if event.finish is not None:
                finishes[event.prompt] = event.finish
        return [
            LocalCompletion(prompt, tuple(tokens[i]), "".join(texts[i]), finishes[i])
            for i, prompt in enumerate(prompts)
        ]
