"""From a JSON object to a `ValidChat` or `ValidCompletion`, or to one `Refused` that names what is wrong.

`routes` calls `Validator` (in a thread when the body is large: tokenising takes time). Types and ranges first, all
problems together; then the text becomes tokens; then the context must hold prompt and answer. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.domain.errors import ContextOverflow, InvalidRequest, ModelNotFound
from baton.domain.ids import RequestId
from baton.domain.request import SamplingParams, StopParams
from services.router.api import parameters
from services.router.api.bounds import (
    MAX_CALL_CHOICES,
    MAX_TOKENS,
    MAX_TOKENS_WITH_ECHO,
    TOP_LOGPROBS,
    Integers,
)
from services.router.api.calls import Streaming, ValidChat, ValidCompletion
from services.router.api.fields import Fields, Problems, shown
from services.router.api.prompts import Prompt, read_messages, read_prompts
from services.router.generation import GenerationJob
from services.router.text.model import TextModel

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Origin:
    """What makes a call besides its body; the same body of the same origin is the same call again.

    `seed` stands in where the client gives none. `tenant` is whose call it is, "" without API keys.
    """

    id: RequestId
    created_s: int
    seed: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class _Wishes:
    """The shared parameters of a body whose prompts are not tokenised yet."""

    num_choices: int
    sampling: SamplingParams
    seed: int | None
    length: parameters.Length
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    salt: str
    skip_special_tokens: bool
    return_token_ids: bool
    streaming: Streaming | None


class Validator:
    """What a request is held against: one model and its bounds. Thread-safe."""

    def __init__(self, text: TextModel, model_name: str, max_model_len: int, deadline_s: float) -> None:
        """`max_model_len` in tokens, prompt and answer together."""
        self._text = text
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._deadline_s = deadline_s

    def chat(self, body: Body, origin: Origin) -> ValidChat:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`."""
        fields = Fields(body, Problems())
        wishes = self._read_wishes(fields, _chat_logprobs(fields), origin.tenant, lengths=MAX_TOKENS)
        messages = read_messages(fields)
        fields.problems.raise_if_any()
        text = self._text.render_chat(messages)
        self._refuse_hopeless(text, wishes, "messages")
        tokens = self._text.encode(text, add_special_tokens=False)
        jobs = self._jobs(origin, (tokens,), wishes, "messages")
        return ValidChat(
            id=origin.id,
            model=self._model_name,
            created_s=origin.created_s,
            prompts=(tokens,),
            jobs=jobs,
            num_choices=wishes.num_choices,
            stop_strings=wishes.stop_strings,
            skip_special_tokens=wishes.skip_special_tokens,
            return_token_ids=wishes.return_token_ids,
            streaming=wishes.streaming,
        )

    def completion(self, body: Body, origin: Origin) -> ValidCompletion:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`."""
        fields = Fields(body, Problems())
        echo = fields.flag("echo", False)
        logprobs = fields.integer("logprobs", TOP_LOGPROBS)
        if echo and logprobs is not None:
            fields.note("logprobs", "together with echo is not supported yet")
        wishes = self._read_wishes(
            fields, logprobs, origin.tenant, lengths=MAX_TOKENS_WITH_ECHO if echo else MAX_TOKENS
        )
        texts = read_prompts(fields, self._text.vocab_size)
        if len(texts) * wishes.num_choices > MAX_CALL_CHOICES:
            fields.note("n", f"times the number of prompts must not be over {MAX_CALL_CHOICES}")
        fields.problems.raise_if_any()
        prompts = tuple(self._encode(prompt, wishes) for prompt in texts)
        return ValidCompletion(
            id=origin.id,
            model=self._model_name,
            created_s=origin.created_s,
            prompts=prompts,
            jobs=self._jobs(origin, prompts, wishes, "prompt"),
            num_choices=wishes.num_choices,
            stop_strings=wishes.stop_strings,
            skip_special_tokens=wishes.skip_special_tokens,
            return_token_ids=wishes.return_token_ids,
            streaming=wishes.streaming,
            echoes=tuple(self._echo(prompt) if echo else "" for prompt in texts for _ in range(wishes.num_choices)),
        )

    def _read_wishes(self, fields: Fields, logprobs: int | None, tenant: str, *, lengths: Integers) -> _Wishes:
        self._check_model(fields)
        parameters.read_ignored(fields)
        vocab_size = self._text.vocab_size
        stop_token_ids = parameters.read_stop_token_ids(fields, vocab_size)
        if not fields.flag("ignore_eos", False):
            stop_token_ids |= self._text.eos_token_ids
        return _Wishes(
            num_choices=parameters.read_num_choices(fields),
            sampling=parameters.read_sampling(fields, vocab_size, logprobs, self._text.sampling_defaults),
            seed=parameters.read_seed(fields),
            length=parameters.read_length(fields, lengths),
            stop_strings=parameters.read_stop_strings(fields),
            stop_token_ids=stop_token_ids,
            salt=parameters.read_salt(fields, tenant),
            skip_special_tokens=fields.flag("skip_special_tokens", True),
            return_token_ids=fields.flag("return_token_ids", False),
            streaming=parameters.read_streaming(fields),
        )

    def _check_model(self, fields: Fields) -> None:
        """A name that is not ours is refused at once: nothing else in the body can be judged then."""
        model = fields.raw("model")
        if model == self._model_name:
            return
        if isinstance(model, str) and model:
            raise ModelNotFound(f"the model {shown(model)} does not exist here", param="model")
        fields.expected("model", "the name of a model")

    def _encode(self, prompt: Prompt, wishes: _Wishes) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._refuse_hopeless(prompt, wishes, "prompt")
        tokens = self._text.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        if not tokens:
            raise InvalidRequest("prompt: has no tokens", param="prompt")
        return tokens

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self._text.decode(prompt, skip_special_tokens=True)

    def _jobs(
        self, origin: Origin, prompts: Sequence[tuple[int, ...]], wishes: _Wishes, param: str
    ) -> tuple[GenerationJob, ...]:
        """One job a choice; the call's id names the first, `-1`, `-2`, ... the others.

        A client's seed is every prompt's; from one that was drawn, all choices of all prompts count up.
        """
        stops = [self._stop(prompt, wishes, param) for prompt in prompts]
        if wishes.length.max_tokens == 0:
            return ()
        jobs: list[GenerationJob] = []
        for prompt, stop in zip(prompts, stops, strict=True):
            seed = origin.seed + len(jobs) if wishes.seed is None else wishes.seed
            for choice in range(wishes.num_choices):
                job_id = RequestId(f"{origin.id}-{len(jobs)}") if jobs else origin.id
                sampling = replace(wishes.sampling, seed=parameters.seed_of_choice(seed, choice))
                jobs.append(GenerationJob(job_id, prompt, sampling, stop, wishes.salt, self._deadline_s))
        return tuple(jobs)

    def _refuse_hopeless(self, text: str, wishes: _Wishes, param: str) -> None:
        """Tokenising megabytes takes seconds, which is too dear for what is too long however it is tokenised."""
        self._room_for(self._text.min_tokens(text), wishes, param, "at least ")

    def _stop(self, prompt: Sequence[int], wishes: _Wishes, param: str) -> StopParams:
        """Bounds the answer by the context. Raises `ContextOverflow` with the numbers."""
        length, room = wishes.length, self._room_for(len(prompt), wishes, param)
        max_tokens = room if length.max_tokens is None else length.max_tokens
        return StopParams(max_tokens, length.min_tokens, wishes.stop_token_ids)

    def _room_for(self, num_prompt_tokens: int, wishes: _Wishes, param: str, known: str = "") -> int:
        """What the context leaves to the answer, in tokens. `known` is how well the prompt's length is known."""
        length = wishes.length
        least = max(1, length.min_tokens) if length.max_tokens is None else length.max_tokens
        room = self._max_model_len - num_prompt_tokens
        if least > room:
            raise ContextOverflow(
                f"this model's context is {self._max_model_len} tokens; the prompt has {known}{num_prompt_tokens} and "
                f"the answer asks for {'at least ' if length.max_tokens is None else ''}{least}: "
                f"{num_prompt_tokens + least} in all",
                param=param,
            )
        return room


def _chat_logprobs(fields: Fields) -> int | None:
    """None: not wanted; k: the chosen token's and the k best."""
    wanted = fields.flag("logprobs", False)
    num_top = fields.integer("top_logprobs", TOP_LOGPROBS)
    if num_top is not None and not wanted:
        fields.note("top_logprobs", "needs logprobs: true")
    return (num_top or 0) if wanted else None
