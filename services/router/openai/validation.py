"""Turns a JSON object into a `ValidRequest`, or raises one `Refused` that names every error.

Checks types and ranges first and reports all errors together. Then tokenizes, then checks that the context holds prompt
and answer. `request_parser` calls it, in a thread for large bodies. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.errors import ConstraintFailed, ContextOverflow, InvalidRequest, ModelNotFound
from baton.domain.ids import RequestId
from baton.domain.media.span import MediaSpan
from baton.domain.request import StopParams
from baton.domain.values.quick_init import quick_init
from baton.services.router.generation import MediaFile, SequenceSpec
from baton.services.router.openai.bounds import (
    DEFAULT_COMPLETION_TOKENS,
    LENGTHS,
    MAX_PROMPT_SCORES,
    MAX_REQUEST_CHOICES,
    MAX_TOKENS_WITH_ECHO,
)
from baton.services.router.openai.constraint.reader import RequestedConstraint
from baton.services.router.openai.field_table.field import FieldEndpoint
from baton.services.router.openai.field_table.table import SCALARS, CheckedFields, check_fields
from baton.services.router.openai.fields import FieldErrors, Fields, short_repr
from baton.services.router.openai.images.parts import ImageParts
from baton.services.router.openai.parameters import CommonParams, choice_seed, read_common_params
from baton.services.router.openai.prompts import PromptInput, read_chat, read_prompts
from baton.services.router.openai.reasoning.phases import with_reasoning
from baton.services.router.openai.reasoning.reader import BUDGET, RequestedReasoning, read_reasoning
from baton.services.router.openai.tools.functions import with_functions
from baton.services.router.openai.tools.reader import TOOL_FIELDS, TOOLS, RequestedTools, read_tools, with_form
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel
from baton.services.router.vision.remote.fetcher import Fetched

MAX_CHAR_BYTES = 4
"""Most bytes of a character in UTF-8. A token has at least one byte."""

Body = Mapping[str, object]

_ECHO_SCALARS = {**SCALARS[FieldEndpoint.COMPLETION], **dict.fromkeys(LENGTHS, MAX_TOKENS_WITH_ECHO)}
"""For a completion with `echo: true`."""


@quick_init
@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """The part of a request beside its body; body and metadata determine the request.

    `seed` is used if the client gives none. `tenant` is "" without API keys. `private`: the state store gets nothing
    of the request.
    """

    id: RequestId
    created_s: int
    seed: int
    tenant: str = ""
    private: bool = False


class RequestValidator:
    """Validates requests to one model. Thread-safe."""

    def __init__(
        self,
        text: TextModel,
        model_name: str,
        max_model_len: int,
        deadline_s: float,
        other_names: Collection[str] = (),
        images: ImageModel | None = None,
    ) -> None:
        """`max_model_len` in tokens, prompt and answer together. `other_names`: further names of the same model.

        `images`: of the model; None for a model of text.
        """
        self._images = images or ImageModel()
        self._text = text
        self._names = frozenset({model_name, *other_names})
        self._max_model_len = max_model_len
        self._deadline_s = deadline_s

    def image_parts(self, *, stored: bool = False, fetched: Fetched | None = None) -> ImageParts:
        """A reader of one chat's images. `stored`: of a body from the state store. `fetched`: files of its URLs."""
        return ImageParts(self._images, self._text, stored=stored, fetched=fetched)

    def chat(self, body: Body, metadata: RequestMetadata, images: ImageParts | None = None) -> ValidRequest:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`. `images`: a new reader, for its result."""
        return self.render(body, metadata, images)[0]

    def render(
        self, body: Body, metadata: RequestMetadata, images: ImageParts | None = None
    ) -> tuple[ValidRequest, str]:
        """A chat, and the text of its prompt, with one placeholder for each image. Raises as `chat`."""
        images = images or self.image_parts()
        checked = self._open(body, FieldEndpoint.CHAT)
        fields = checked.fields
        scalars = fields.read(SCALARS[FieldEndpoint.CHAT])
        logprobs = None
        if scalars.get("logprobs"):
            logprobs = scalars.get("top_logprobs", 0)
        elif "top_logprobs" in scalars:
            fields.add_error("top_logprobs", "needs logprobs: true")
        params = read_common_params(fields, scalars, logprobs, self._text, metadata.tenant, metadata.seed)
        chat = read_chat(fields, scalars, self._text, metadata.created_s, images)
        tools, older = None, with_functions(fields)
        fields = older or fields
        if not fields.values.keys().isdisjoint(TOOL_FIELDS):
            tools, params = self._read_tools(fields, params, scalars)
            tools = tools and replace(tools, as_function_call=older is not None)
            chat = chat.with_tools(() if tools is None else tools.definitions)
        fields.errors.raise_if_any()
        text = self._text.render_chat(chat.messages, chat.options)
        reasoning, params = self._read_reasoning(fields, params, scalars, text, chat.continued)
        if self._may_be_too_long(text, params):
            self._remaining_context(self._text.min_tokens(text), params, "messages", "at least ")
        framed = scalars.get("add_special_tokens", False)
        tokens, media = images.place(self._text.encode(images.mark(text), add_special_tokens=framed), "messages")
        if media:
            _check_media(params)
        tokens = self._truncated(tokens, params)
        built = self._build(
            metadata,
            str(body["model"]),
            (tokens,),
            params,
            "messages",
            unknown_fields=checked.unknown + chat.unread,
            tools=tools,
            reasoning=reasoning,
        )
        return (_with_media(built, media, images.files) if media else built), text

    def _read_tools(
        self, fields: Fields, params: CommonParams, scalars: Mapping[str, Any]
    ) -> tuple[RequestedTools | None, CommonParams]:
        """The tools of a chat, and the parameters with their constraint."""
        ignore_eos = scalars.get("ignore_eos", False)
        tools = read_tools(fields, self._text, ignore_eos=ignore_eos, min_tokens=params.min_tokens)
        if tools is None:
            return None, params
        constraint = tools.constraint
        if params.constraint is not None:
            try:
                constraint = with_form(tools, params.constraint, self._text)
            except ConstraintFailed as error:
                fields.add_error(TOOLS, str(error))
        if constraint is None:
            return tools, params
        stop_token_ids = params.stop_token_ids | self._text.eos_token_ids
        return tools, replace(params, constraint=constraint, stop_token_ids=stop_token_ids)

    def _read_reasoning(
        self, fields: Fields, params: CommonParams, scalars: Mapping[str, Any], prompt: str, continued: str | None
    ) -> tuple[RequestedReasoning | None, CommonParams]:
        """How the reasoning is read, and the parameters with the constraint of the whole output."""
        reasoning = read_reasoning(fields, scalars, self._text, prompt, continued)
        fields.errors.raise_if_any()
        if reasoning is None:
            return None, params
        requested = params.constraint
        plain = Constraint(
            (FreePhase(),), None, self._text.eos_token_ids, scalars.get("ignore_eos", False), params.min_tokens
        )
        try:
            value = with_reasoning(
                None if requested is None else requested.value,
                reasoning,
                self._text,
                plain,
                is_calls=requested is not None and requested.is_calls,
            )
        except ConstraintFailed as error:
            param = fields.errors.name_of(error.param or (BUDGET if requested is None else requested.param))
            raise ConstraintFailed(f"{param}: {error}", error.reason, param=param) from None
        if value is None:
            return reasoning, params
        if requested is None:
            requested = RequestedConstraint(value, fields.errors.name_of(BUDGET))
        is_form = params.constraint is not None and isinstance(params.constraint.value.phases[0], GrammarPhase)
        params = replace(params, constraint=replace(requested, value=value))
        return replace(reasoning, keep_space=is_form), params

    def completion(self, body: Body, metadata: RequestMetadata) -> ValidRequest:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`."""
        checked = self._open(body, FieldEndpoint.COMPLETION)
        fields, echo = checked.fields, body.get("echo") is True
        scalars = fields.read(_ECHO_SCALARS if echo else SCALARS[FieldEndpoint.COMPLETION])
        is_open = body.get("n_predict") == -1  # llama-server's name for: to the end of the context
        default = None if is_open else DEFAULT_COMPLETION_TOKENS
        logprobs, tenant = scalars.get("logprobs"), metadata.tenant
        params = read_common_params(fields, scalars, logprobs, self._text, tenant, metadata.seed, default)
        texts = read_prompts(fields, self._text.vocab_size)
        if len(texts) * params.num_choices > MAX_REQUEST_CHOICES:
            fields.add_error("n", f"times the number of prompts must not be over {MAX_REQUEST_CHOICES}")
        fields.errors.raise_if_any()
        framed = scalars.get("add_special_tokens", True)
        prompts = tuple(self._encode(prompt, params, framed=framed) for prompt in texts)
        texts = [prompts[at] if params.truncation is not None else each for at, each in enumerate(texts)]
        shown = [self._echo(each) if echo else "" for each in texts]
        echoes = tuple(text for text in shown for _ in range(params.num_choices))
        return self._build(
            metadata,
            str(body["model"]),
            prompts,
            params,
            "prompt",
            continues_prompt=True,
            echoes=echoes,
            unknown_fields=checked.unknown,
        )

    def check_model(self, name: str) -> None:
        """Raises `ModelNotFound` unless the model has this name."""
        if name not in self._names:
            raise ModelNotFound(f"the model {short_repr(name)} does not exist here", param="model")

    def _open(self, body: Body, endpoint: FieldEndpoint) -> CheckedFields:
        """Checks names against the table. Raises `ModelNotFound` at once: the rest of the body cannot be judged."""
        errors, model = FieldErrors(), body.get("model")
        if isinstance(model, str) and model:
            self.check_model(model)
        else:
            Fields(body, errors).add_mismatch("model", "the name of a model")
        return check_fields(body, endpoint, errors)

    def _encode(self, prompt: PromptInput, params: CommonParams, *, framed: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._may_be_too_long(prompt, params):
                self._remaining_context(self._text.min_tokens(prompt), params, "prompt", "at least ")
            prompt = self._text.encode(prompt, add_special_tokens=framed)
        if not prompt:
            raise InvalidRequest("prompt: has no tokens", param="prompt")
        if self._images.rules is not None and self._images.rules.placeholder in prompt:
            raise InvalidRequest("prompt: has the placeholder of an image; images come in chats", param="prompt")
        return self._truncated(prompt, params)

    def _truncated(self, prompt: tuple[int, ...], params: CommonParams) -> tuple[int, ...]:
        """What `truncate_prompt_tokens` leaves of a prompt. Raises `InvalidRequest` for more than the context holds."""
        if params.truncation is None:
            return prompt
        asked = params.default_max_tokens if params.max_tokens is None else params.max_tokens
        most = self._max_model_len - max(1, params.min_tokens, asked or 0)
        if not 0 < most >= params.truncation.num_tokens:
            why = f"must not be over {most}, what this model's context leaves for a prompt"
            raise InvalidRequest(f"truncate_prompt_tokens: {why}", param="truncate_prompt_tokens")
        return params.truncation.cut(prompt, most)

    def _echo(self, prompt: PromptInput) -> str:
        return prompt if isinstance(prompt, str) else self._text.decode(prompt, skip_special_tokens=True)

    def _build(
        self,
        metadata: RequestMetadata,
        model: str,
        prompts: tuple[tuple[int, ...], ...],
        params: CommonParams,
        param: str,
        **more: Any,
    ) -> ValidRequest:
        """Makes one sequence for each choice. The id of the request names the first; others add `-1`, `-2`, ...

        `more`: further fields of the request.
        A seed of the client is used for every prompt. A drawn seed counts up over all choices of all prompts. Raises
        `ContextOverflow`.
        """
        sequences: list[SequenceSpec] = []
        k = self._num_scored(prompts, params)
        for prompt in prompts:
            remaining = self._remaining_context(len(prompt), params, param)
            max_tokens = params.max_tokens
            if max_tokens is None:
                max_tokens = min(remaining, params.default_max_tokens or remaining)
            elif k is not None:
                max_tokens = max(1, max_tokens)
            min_tokens = params.min_tokens if params.constraint is None else 0  # the constraint has them
            stop = StopParams(max_tokens, min_tokens, params.stop_token_ids)
            seed = metadata.seed + len(sequences) if params.seed is None else params.seed
            for choice in range(params.num_choices if max_tokens else 0):
                id = RequestId(f"{metadata.id}-{len(sequences)}") if sequences else metadata.id
                sampling, own_seed = params.sampling, choice_seed(seed, choice)
                if own_seed != sampling.seed:
                    sampling = replace(sampling, seed=own_seed)
                sequences.append(
                    SequenceSpec(
                        id, prompt, sampling, stop, params.salt, self._deadline_s,
                        tenant=metadata.tenant, priority=params.priority,
                        constraint=None if params.constraint is None else params.constraint.value,
                        prompt_logprobs=None if choice else k, affinity=params.affinity,
                    )
                )  # fmt: skip
        return ValidRequest(
            id=metadata.id,
            model=model,
            created_s=metadata.created_s,
            prompts=prompts,
            sequences=tuple(sequences),
            num_choices=params.num_choices,
            stop_strings=params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            return_token_ids=params.return_token_ids,
            include_stop=params.include_stop,
            constraint=params.constraint,
            stream_options=params.stream_options,
            scores=params.scores,
            tokens_as_ids=params.tokens_as_ids,
            drops_output=k is not None and params.max_tokens == 0,
            **more,
        )

    @staticmethod
    def _num_scored(prompts: Sequence[tuple[int, ...]], params: CommonParams) -> int | None:
        """Best tokens to score at each place of the prompts; None: nothing is scored. Raises `InvalidRequest`."""
        if params.scores is None:
            return None
        num_scores = (params.scores.k + 1) * sum(map(len, prompts))
        if num_scores > MAX_PROMPT_SCORES:
            name = "logprobs" if params.scores.listed is None else "prompt_logprobs"
            asked = f"{params.scores.k} and the prompt's own at each place of the prompts: {num_scores} in all"
            raise InvalidRequest(f"{name}: asks for {asked}; {MAX_PROMPT_SCORES} are the most", param=name)
        return params.scores.k

    def _may_be_too_long(self, text: str, params: CommonParams) -> bool:
        """True if the text must be checked before it is tokenized: tokenizing megabytes takes seconds."""
        return params.truncation is None and MAX_CHAR_BYTES * len(text) > self._max_model_len

    def _remaining_context(self, num_prompt_tokens: int, params: CommonParams, param: str, known: str = "") -> int:
        """Tokens that the context leaves for the answer. `known`: precision of `num_prompt_tokens`, for the error.

        Raises `ContextOverflow` if the answer needs more.
        """
        least = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if params.scores is not None:
            least = max(1, least)  # a worker samples a token in any case
        remaining = self._max_model_len - num_prompt_tokens
        if least > remaining:
            known_least = "at least " if params.max_tokens is None else ""
            raise ContextOverflow(
                f"this model's maximum context length is {self._max_model_len} tokens; the prompt has "
                f"{known}{num_prompt_tokens} and the answer asks for {known_least}{least}: "
                f"{num_prompt_tokens + least} in all",
                param=param,
            )
        return remaining


def _check_media(params: CommonParams) -> None:
    """Refuses what is not defined for a prompt with images. Raises `InvalidRequest`."""
    if params.truncation is not None:
        raise InvalidRequest("truncate_prompt_tokens: is not supported with images", param="truncate_prompt_tokens")
    if params.scores is not None:
        raise InvalidRequest("prompt_logprobs: is not supported with images", param="prompt_logprobs")


def _with_media(request: ValidRequest, media: tuple[MediaSpan, ...], files: tuple[MediaFile, ...]) -> ValidRequest:
    sequences = tuple(replace(sequence, media=media, files=files) for sequence in request.sequences)
    return replace(request, sequences=sequences)
