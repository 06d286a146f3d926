"""Reads the parameters that chats and completions share: sampling, length, stopping, streaming.

Called by `validation` with the scalars of a body. Notes errors instead of raising them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.request import SamplingParams
from baton.domain.values.quick_init import quick_init
from baton.services.router.openai.bounds import (
    FLAG,
    INT64_MIN,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    STREAM_FLAGS,
)
from baton.services.router.openai.constraint.reader import (
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    RequestedConstraint,
    read_constraint,
)
from baton.services.router.openai.fields import Fields, is_integer, is_number, short_repr
from baton.services.router.openai.truncation.reader import CUTS, PromptTruncation, read_truncation
from baton.services.router.openai.valid_request import RequestedScores, StreamOptions
from baton.services.router.text.text_model import TextModel

_FORM_FIELDS = frozenset({RESPONSE_FORMAT, STRUCTURED_OUTPUTS})
_STREAM_SCALARS = dict.fromkeys(STREAM_FLAGS, FLAG)


@quick_init
@dataclass(frozen=True, slots=True)
class CommonParams:
    """Parameters of both endpoints.

    `max_tokens` None: the client names none. Then it is `default_max_tokens`, or less where the context ends; None: to
    the end of the context.
    """

    num_choices: int
    sampling: SamplingParams
    seed: int | None
    max_tokens: int | None
    default_max_tokens: int | None
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    salt: str
    priority: int
    skip_special_tokens: bool
    return_token_ids: bool
    include_stop: bool
    constraint: RequestedConstraint | None
    stream_options: StreamOptions | None
    scores: RequestedScores | None = None
    tokens_as_ids: bool = False
    truncation: PromptTruncation | None = None
    affinity: str = ""


def read_common_params(
    fields: Fields,
    scalars: Mapping[str, Any],
    logprobs: int | None,
    text: TextModel,
    tenant: str,
    seed: int,
    default_max_tokens: int | None = None,
) -> CommonParams:
    """Combines `scalars`, the scalar fields, with the other fields. Absent sampling parameters default to the model's.

    `sampling` has the seed of the first choice: the client's, or `seed`.
    """
    body, get = fields.values, scalars.get
    _check_consistency(fields, scalars, default_max_tokens)
    constraint = None
    if not body.keys().isdisjoint(_FORM_FIELDS):
        flags = {"ignore_eos": get("ignore_eos", False), "min_tokens": get("min_tokens", 0)}
        constraint = read_constraint(fields, text, **flags)
    defaults, top_k, older = text.sampling_defaults, get("top_k"), get("max_tokens")
    stop_token_ids = _read_stop_token_ids(fields, text.vocab_size) if "stop_token_ids" in body else frozenset[int]()
    return CommonParams(
        num_choices=get("n", 1),
        sampling=SamplingParams(
            temperature=float(get("temperature", defaults.temperature)),
            top_k=min(max(defaults.top_k if top_k is None else top_k, 0), text.vocab_size),
            top_p=float(get("top_p", defaults.top_p)),
            min_p=float(get("min_p", defaults.min_p)),
            presence_penalty=float(get("presence_penalty", 0.0)),
            frequency_penalty=float(get("frequency_penalty", 0.0)),
            repetition_penalty=float(get("repetition_penalty", defaults.repetition_penalty)),
            seed=choice_seed(get("seed", seed), 0),
            logit_bias=_read_logit_bias(fields, text.vocab_size) if "logit_bias" in body else (),
            logprobs=logprobs,
            allowed_token_ids=_read_allowed(fields, text.vocab_size) if "allowed_token_ids" in body else (),
            bad_words=_read_bad_words(fields, text) if "bad_words" in body else (),
            logprob_token_ids=_read_named(fields, logprobs, text.vocab_size) if "logprob_token_ids" in body else (),
        ),
        seed=get("seed"),
        max_tokens=get("max_completion_tokens", older),
        default_max_tokens=default_max_tokens,
        min_tokens=get("min_tokens", 0),
        stop_strings=_read_stop_strings(fields) if "stop" in body else (),
        stop_token_ids=stop_token_ids
        if get("ignore_eos") and constraint is None  # a complete text ends in any case
        else stop_token_ids | text.eos_token_ids,
        salt=_digest(tenant, get("cache_salt", "")) if tenant or "cache_salt" in scalars else "",
        priority=get("priority", 0),
        skip_special_tokens=get("skip_special_tokens", True),
        return_token_ids=get("return_token_ids", False),
        include_stop=get("include_stop_str_in_output", False),
        constraint=constraint,
        stream_options=_read_stream_options(fields, get("stream", False)),
        scores=None
        if (listed := get("prompt_logprobs")) is None and (logprobs is None or not get("echo"))
        else RequestedScores(logprobs if get("echo") else None, listed),
        tokens_as_ids=get("return_tokens_as_token_ids", False),
        truncation=read_truncation(fields, scalars) if not body.keys().isdisjoint(CUTS) else None,
        affinity=_digest(tenant, scalars["prompt_cache_key"]) if "prompt_cache_key" in scalars else "",
    )


def choice_seed(seed: int, choice: int) -> int:
    """Seed of a choice: counts up from `seed`, and wraps around after the largest int64."""
    return (seed + choice - INT64_MIN) % 2**64 + INT64_MIN


def _check_consistency(fields: Fields, scalars: Mapping[str, Any], default_max_tokens: int | None) -> None:
    """Notes fields that contradict each other."""
    num_choices, best_of, name_of = scalars.get("n", 1), fields.values.get("best_of"), fields.errors.name_of
    if best_of is not None and best_of != num_choices:
        fields.add_error("best_of", f"must equal {name_of('n')} ({num_choices}), not {short_repr(best_of)}")
    max_tokens = scalars.get("max_completion_tokens", scalars.get("max_tokens", default_max_tokens))
    min_tokens = scalars.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        fields.add_error("min_tokens", f"must not be over {name_of('max_tokens')} ({max_tokens}), not {min_tokens}")


def _read_stop_strings(fields: Fields) -> tuple[str, ...]:
    """A string or a list of strings."""
    value = fields.values.get("stop")
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > MAX_STOP_STRINGS:
        fields.add_mismatch("stop", f"a string or a list of at most {MAX_STOP_STRINGS} strings")
        return ()
    valid = [stop for stop in stops if isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS]
    if len(valid) < len(stops):
        fields.add_mismatch("stop", f"made of strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(valid)


def _read_stop_token_ids(fields: Fields, vocab_size: int) -> frozenset[int]:
    """Token ids that end the sequence, beside the model's own."""
    value = fields.values.get("stop_token_ids")
    if value is None:
        return frozenset()
    if (
        not isinstance(value, list)
        or len(value) > MAX_STOP_TOKEN_IDS
        or not all(is_integer(token) and 0 <= token < vocab_size for token in value)
    ):
        fields.add_mismatch("stop_token_ids", f"a list of at most {MAX_STOP_TOKEN_IDS} token ids in [0, {vocab_size})")
        return frozenset()
    return frozenset(value)


def _read_allowed(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The only token ids to sample, without repetitions."""
    return tuple(sorted(_read_ids(fields, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, vocab_size)))


def _read_named(fields: Fields, logprobs: int | None, vocab_size: int) -> tuple[int, ...]:
    """The token ids to list in logprobs, in the client's order without repetitions."""
    named = _read_ids(fields, "logprob_token_ids", MAX_LOGPROB_TOKEN_IDS, vocab_size)
    if named and logprobs is None:
        fields.add_error("logprob_token_ids", "needs logprobs")
    elif named and fields.values.get("echo"):
        fields.add_error("logprob_token_ids", "is not supported with echo")
    return named


def _read_ids(fields: Fields, name: str, limit: int, vocab_size: int) -> tuple[int, ...]:
    """A list of 1 to `limit` token ids, without repetitions; () if absent."""
    value = fields.values.get(name)
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= limit
        or not all(is_integer(token) and 0 <= token < vocab_size for token in value)
    ):
        fields.add_mismatch(name, f"a list of 1 to {limit} token ids in [0, {vocab_size})")
        return ()
    return tuple(dict.fromkeys(value))


def _read_bad_words(fields: Fields, text: TextModel) -> tuple[tuple[int, ...], ...]:
    """The token sequences of texts that the output must not have.

    As in vLLM: of each text without its leading spaces, and of the same behind a space where that is as many tokens
    with another first one.
    """
    value = fields.values.get("bad_words")
    if value is None:
        return ()
    words = [word for word in value if isinstance(word, str)] if isinstance(value, list) else []
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS or len(words) < len(value):
        fields.add_mismatch("bad_words", f"a list of at most {MAX_BAD_WORDS} strings")
        return ()
    if not all(word.strip() and len(word) <= MAX_BAD_WORD_CHARS for word in words):
        fields.add_mismatch("bad_words", f"made of strings of 1 to {MAX_BAD_WORD_CHARS} characters, not all spaces")
        return ()
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain = text.encode(word.lstrip(), add_special_tokens=False)
        spaced = text.encode(" " + word.lstrip(), add_special_tokens=False)
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


def _read_stream_options(fields: Fields, stream: bool) -> StreamOptions | None:
    """`stream_options`; requires `stream`."""
    options = fields.mapping("stream_options") if "stream_options" in fields.values else None
    if options is None:
        return StreamOptions() if stream else None
    if not stream:
        fields.add_error("stream_options", "needs stream: true")
    flags = options.read(_STREAM_SCALARS)
    return StreamOptions(*[flags.get(name, False) for name in STREAM_FLAGS]) if stream else None


def _digest(tenant: str, text: str) -> str:
    """A digest that separates tenants, whatever they send.

    It is the salt of the page keys (requests with different salts share no cached page), and the name of an affinity.
    """
    parts = (str(len(tenant)).encode(), tenant.encode(), text.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _read_logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Token id (a JSON key, so a string) -> bias, clamped."""
    value = fields.values.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        fields.add_mismatch("logit_bias", f"an object of at most {MAX_LOGIT_BIASES} entries")
        return ()
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size and is_number(bias)):
            fields.add_error(
                "logit_bias", f"must map token ids in [0, {vocab_size}) to numbers, not {short_repr({key: bias})}"
            )
            return ()
        biases[int(key)] = float(
            min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
        )  # an integer may be too large for a float
    return tuple(sorted(biases.items()))
