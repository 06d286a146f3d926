"""From a JSON object to a `ValidChatRequest` or `ValidCompletionRequest`, or to one `Refused` that names what is wrong.

`routes` calls `RequestValidator` (in a thread when the body is large: tokenising takes time). Types and ranges first,
all errors together; then the text becomes tokens; then the context must hold prompt and answer. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.domain.errors import ContextOverflow, InvalidRequest, ModelNotFound
from baton.domain.ids import RequestId
from baton.domain.request import SamplingParams, StopParams
from services.router.generation import SequenceSpec
from services.router.openai import parameters
from services.router.openai.bounds import (
    MAX_REQUEST_CHOICES,
    MAX_TOKENS,
    MAX_TOKENS_WITH_ECHO,
    TOP_LOGPROBS,
    IntegerRange,
)
from services.router.openai.fields import FieldErrors, Fields, short_repr
from services.router.openai.prompts import PromptInput, read_messages, read_prompts
from services.router.openai.valid_request import StreamOptions, ValidChatRequest, ValidCompletionRequest
from services.router.text.text_model import TextModel

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """What makes a call besides its body; the same body of the same metadata is the same call again.

    `seed` stands in where the client gives none. `tenant` is whose call it is, "" without API keys.
    """

    id: RequestId
    created_s: int
    seed: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class _CommonParams:
    """The shared parameters of a body whose prompts are not tokenised yet."""

    num_choices: int
    sampling: SamplingParams
    seed: int | None
    length: parameters.OutputLength
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    salt: str
    skip_special_tokens: bool
    return_token_ids: bool
    stream_options: StreamOptions | None


class RequestValidator:
    """What a request is held against: one model and its bounds. Thread-safe."""

    def __init__(self, text: TextModel, model_name: str, max_model_len: int, deadline_s: float) -> None:
        """`max_model_len` in tokens, prompt and answer together."""
        self._text = text
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._deadline_s = deadline_s

    def chat(self, body: Body, metadata: RequestMetadata) -> ValidChatRequest:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`."""
        fields = Fields(body, FieldErrors())
        params = self._read_common_params(fields, _chat_logprobs(fields), metadata.tenant, lengths=MAX_TOKENS)
        messages = read_messages(fields)
        fields.errors.raise_if_any()
        text = self._text.render_chat(messages)
        self._reject_too_long(text, params, "messages")
        tokens = self._text.encode(text, add_special_tokens=False)
        sequences = self._sequences(metadata, (tokens,), params, "messages")
        return ValidChatRequest(
            id=metadata.id,
            model=self._model_name,
            created_s=metadata.created_s,
            prompts=(tokens,),
            sequences=sequences,
            num_choices=params.num_choices,
            stop_strings=params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            return_token_ids=params.return_token_ids,
            stream_options=params.stream_options,
        )

    def completion(self, body: Body, metadata: RequestMetadata) -> ValidCompletionRequest:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`."""
        fields = Fields(body, FieldErrors())
        echo = fields.flag("echo", False)
        logprobs = fields.integer("logprobs", TOP_LOGPROBS)
        if echo and logprobs is not None:
            fields.add_error("logprobs", "together with echo is not supported yet")
        params = self._read_common_params(
            fields, logprobs, metadata.tenant, lengths=MAX_TOKENS_WITH_ECHO if echo else MAX_TOKENS
        )
        texts = read_prompts(fields, self._text.vocab_size)
        if len(texts) * params.num_choices > MAX_REQUEST_CHOICES:
            fields.add_error("n", f"times the number of prompts must not be over {MAX_REQUEST_CHOICES}")
        fields.errors.raise_if_any()
        prompts = tuple(self._encode(prompt, params) for prompt in texts)
        return ValidCompletionRequest(
            id=metadata.id,
            model=self._model_name,
            created_s=metadata.created_s,
            prompts=prompts,
            sequences=self._sequences(metadata, prompts, params, "prompt"),
            num_choices=params.num_choices,
            stop_strings=params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            return_token_ids=params.return_token_ids,
            stream_options=params.stream_options,
            echoes=tuple(self._echo(prompt) if echo else "" for prompt in texts for _ in range(params.num_choices)),
        )

    def _read_common_params(
        self, fields: Fields, logprobs: int | None, tenant: str, *, lengths: IntegerRange
    ) -> _CommonParams:
        self._check_model(fields)
        parameters.check_unsupported(fields)
        vocab_size = self._text.vocab_size
        stop_token_ids = parameters.read_stop_token_ids(fields, vocab_size)
        if not fields.flag("ignore_eos", False):
            stop_token_ids |= self._text.eos_token_ids
        return _CommonParams(
            num_choices=parameters.read_num_choices(fields),
            sampling=parameters.read_sampling(fields, vocab_size, logprobs, self._text.sampling_defaults),
            seed=parameters.read_seed(fields),
            length=parameters.read_length(fields, lengths),
            stop_strings=parameters.read_stop_strings(fields),
            stop_token_ids=stop_token_ids,
            salt=parameters.read_salt(fields, tenant),
            skip_special_tokens=fields.flag("skip_special_tokens", True),
            return_token_ids=fields.flag("return_token_ids", False),
            stream_options=parameters.read_stream_options(fields),
        )

    def _check_model(self, fields: Fields) -> None:
        """A name that is not ours is refused at once: nothing else in the body can be judged then."""
        model = fields.raw("model")
        if model == self._model_name:
            return
        if isinstance(model, str) and model:
            raise ModelNotFound(f"the model {short_repr(model)} does not exist here", param="model")
        fields.add_mismatch("model", "the name of a model")

    def _encode(self, prompt: PromptInput, params: _CommonParams) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._reject_too_long(prompt, params, "prompt")
        tokens = self._text.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        if not tokens:
            raise InvalidRequest("prompt: has no tokens", param="prompt")
        return tokens

    def _echo(self, prompt: PromptInput) -> str:
        return prompt if isinstance(prompt, str) else self._text.decode(prompt, skip_special_tokens=True)

    def _sequences(
        self, metadata: RequestMetadata, prompts: Sequence[tuple[int, ...]], params: _CommonParams, param: str
    ) -> tuple[SequenceSpec, ...]:
        """One sequence a choice; the call's id names the first, `-1`, `-2`, ... the others.

        A client's seed is every prompt's; from one that was drawn, all choices of all prompts count up.
        """
        stops = [self._stop(prompt, params, param) for prompt in prompts]
        if params.length.max_tokens == 0:
            return ()
        sequences: list[SequenceSpec] = []
        for prompt, stop in zip(prompts, stops, strict=True):
            seed = metadata.seed + len(sequences) if params.seed is None else params.seed
            for choice in range(params.num_choices):
                sequence_id = RequestId(f"{metadata.id}-{len(sequences)}") if sequences else metadata.id
                sampling = replace(params.sampling, seed=parameters.choice_seed(seed, choice))
                sequences.append(SequenceSpec(sequence_id, prompt, sampling, stop, params.salt, self._deadline_s))
        return tuple(sequences)

    def _reject_too_long(self, text: str, params: _CommonParams, param: str) -> None:
        """Tokenising megabytes takes seconds, which is too dear for what is too long however it is tokenised."""
        self._remaining_context(self._text.min_tokens(text), params, param, "at least ")

    def _stop(self, prompt: Sequence[int], params: _CommonParams, param: str) -> StopParams:
        """Bounds the answer by the context. Raises `ContextOverflow` with the numbers."""
        length, remaining = params.length, self._remaining_context(len(prompt), params, param)
        max_tokens = remaining if length.max_tokens is None else length.max_tokens
        return StopParams(max_tokens, length.min_tokens, params.stop_token_ids)

    def _remaining_context(self, num_prompt_tokens: int, params: _CommonParams, param: str, known: str = "") -> int:
        """What the context leaves to the answer, in tokens. `known` is how well the prompt's length is known."""
        length = params.length
        least = max(1, length.min_tokens) if length.max_tokens is None else length.max_tokens
        remaining = self._max_model_len - num_prompt_tokens
        if least > remaining:
            raise ContextOverflow(
                f"this model's context is {self._max_model_len} tokens; the prompt has {known}{num_prompt_tokens} and "
                f"the answer asks for {'at least ' if length.max_tokens is None else ''}{least}: "
                f"{num_prompt_tokens + least} in all",
                param=param,
            )
        return remaining


def _chat_logprobs(fields: Fields) -> int | None:
    """None: not wanted; k: the chosen token's and the k best."""
    wanted = fields.flag("logprobs", False)
    num_top = fields.integer("top_logprobs", TOP_LOGPROBS)
    if num_top is not None and not wanted:
        fields.add_error("top_logprobs", "needs logprobs: true")
    return (num_top or 0) if wanted else None
