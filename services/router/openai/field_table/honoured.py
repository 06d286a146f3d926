"""The fields that have their effect, and the names of other servers that mean the same."""

from __future__ import annotations

from baton.services.router.openai.bounds import (
    DEFAULT_COMPLETION_TOKENS,
    FLAG,
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_CHOICES,
    MAX_REQUEST_CHOICES,
    MAX_TOKENS,
    PRIORITY,
    TEXT,
    TOP_LOGPROBS,
    TRUNCATION,
    Scalar,
    integer,
    number,
)
from baton.services.router.openai.field_table import shapes
from baton.services.router.openai.field_table.field import (
    BOTH,
    CHAT,
    COMPLETION,
    FieldEndpoint,
    FieldKind,
    FieldOrigin,
    RequestField,
    Shape,
)

_OPENAI, _VLLM, _SGLANG, _LLAMA = (
    FieldOrigin.OPENAI,
    FieldOrigin.VLLM,
    FieldOrigin.SGLANG,
    FieldOrigin.LLAMA_SERVER,
)
_MODELS = "the model's own, else "
_CONTEXT = "to the end of the context"


def _row(
    name: str,
    endpoints: frozenset[FieldEndpoint],
    origin: FieldOrigin,
    shape: Scalar | Shape,
    meaning: str,
    *,
    default: object = None,
    note: str = "",
    required: bool = False,
) -> RequestField:
    return RequestField(
        name,
        endpoints,
        FieldKind.HONOURED,
        origin,
        meaning,
        shape,
        default=default,
        default_note=note,
        required=required,
    )


_PROMPT_ROWS = (
    _row("model", BOTH, _OPENAI, TEXT, "The name of a served model.", required=True),
    _row("messages", CHAT, _OPENAI, shapes.MESSAGES, "The chat; the model's template renders it.", required=True),
    _row(
        "prompt", COMPLETION, _OPENAI, shapes.PROMPT,
        "One prompt or several, as text or as token ids. A text must have a token.", required=True,
    ),
    _row("truncate_prompt_tokens", BOTH, _VLLM, TRUNCATION,
         "Keeps as many tokens of a prompt; -1: as the context leaves for it.", note="all"),
    _row("truncation_side", BOTH, _VLLM, shapes.TRUNCATION_SIDE, "The side that truncate_prompt_tokens cuts.",
         default="left"),
    _row("echo", COMPLETION, _OPENAI, FLAG,
         "Begins the answer with the prompt; with logprobs, these with the prompt's.", default=False),
)  # fmt: skip

_TOOL_ROWS = (
    _row("tools", CHAT, _OPENAI, shapes.TOOLS, "Functions that the model may call.", note="none"),
    _row("tool_choice", CHAT, _OPENAI, shapes.TOOL_CHOICE,
         "required and a name constrain the answer to calls; none leaves the tools out of the prompt.", note="auto"),
    _row("parallel_tool_calls", CHAT, _OPENAI, FLAG, "More than one call in an answer. Without tools no effect.",
         default=True),
    _row("functions", CHAT, _OPENAI, shapes.FUNCTIONS,
         "The older form of tools; the answer has one call, as function_call. Not with tools.", note="none"),
    _row("function_call", CHAT, _OPENAI, shapes.FUNCTION_CHOICE, "The older form of tool_choice. Needs functions.",
         note="auto"),
)  # fmt: skip

_TEMPLATE_ROWS = (
    _row("add_generation_prompt", CHAT, _VLLM, FLAG, "The prompt ends with the head of the assistant's turn.",
         default=True),
    _row("continue_final_message", CHAT, _VLLM, FLAG,
         "The answer continues the last message, an assistant's. Not with add_generation_prompt: true.", default=False),
    _row("chat_template_kwargs", CHAT, _VLLM, shapes.TEMPLATE_VARIABLES,
         "Variables of the model's template. The response header names those that it does not read.", note="none"),
    _row("documents", CHAT, _VLLM, shapes.DOCUMENTS,
         "Texts to answer from, as the model's template wants them. A 400 if it reads none.", note="none"),
    _row("verbosity", CHAT, _OPENAI, shapes.VERBOSITY,
         "A variable of the template. A 400 if it does not read it, but for medium.", note="the template's"),
    _row("add_special_tokens", CHAT, _VLLM, FLAG,
         "The prompt is framed by the tokenizer's own tokens; the template writes them by default.", default=False),
    _row("add_special_tokens", COMPLETION, _VLLM, FLAG,
         "A text is framed by the tokenizer's own tokens, such as one for its beginning.", default=True),
    _row("enable_thinking", CHAT, _LLAMA, FLAG, "The same variable in chat_template_kwargs.", note="the template's"),
)  # fmt: skip

_REASONING_ROWS = (
    _row("reasoning_effort", CHAT, _OPENAI, shapes.EFFORT,
         "A variable of the template; none, and any other, also set enable_thinking and thinking. A 400 if the "
         "template reads none of them; none is always accepted.", note="the template's"),
    _row("reasoning", CHAT, _SGLANG, shapes.REASONING, "effort, as reasoning_effort; enabled: false is none.",
         note="the template's"),
    _row("include_reasoning", CHAT, _VLLM, FLAG, "The answer has the reasoning. It is counted in any case.",
         default=True),
    _row("separate_reasoning", CHAT, _SGLANG, FLAG, "Reasoning is a field of its own, not a part of the content.",
         default=True),
    _row("reasoning_format", CHAT, _LLAMA, shapes.REASONING_FORMAT, "none: reasoning stays in the content.",
         default="auto"),
    _row("thinking_token_budget", CHAT, _VLLM, integer(-1, INT32_MAX),
         "Most tokens of reasoning; then its end is forced. -1: any number.", default=-1),
)  # fmt: skip

_SAMPLING_ROWS = (
    _row("temperature", BOTH, _OPENAI, number(0.0, 2.0), "0: the most probable token.", note=_MODELS + "1"),
    _row(
        "top_p", BOTH, _OPENAI, number(0.0, 1.0, exclusive_low=True),
        "Samples from the smallest set of tokens with this probability.", note=_MODELS + "1",
    ),
    _row("top_k", BOTH, _VLLM, integer(-1, INT32_MAX), "Samples from the k best tokens; 0, -1: all.",
         note=_MODELS + "0"),
    _row("min_p", BOTH, _VLLM, number(0.0, 1.0), "Least probability, relative to the best token's.",
         note=_MODELS + "0"),
    _row("presence_penalty", BOTH, _OPENAI, number(-2.0, 2.0), "Lowers tokens that the answer has.", default=0),
    _row("frequency_penalty", BOTH, _OPENAI, number(-2.0, 2.0),
         "Lowers tokens by their count in the answer.", default=0),
    _row(
        "repetition_penalty", BOTH, _VLLM, number(0.0, 2.0, exclusive_low=True),
        "Divides the logits of tokens that prompt or answer have.", note=_MODELS + "1",
    ),
    _row("logit_bias", BOTH, _OPENAI, shapes.LOGIT_BIAS, "Added to logits; clamped to [-100, 100].", note="none"),
    _row("allowed_token_ids", BOTH, _VLLM, shapes.ALLOWED_TOKEN_IDS,
         "The only tokens that are sampled; an end token ends an answer only if it is one.", note="all"),
    _row("bad_words", BOTH, _VLLM, shapes.BAD_WORDS,
         "Texts whose last token is not sampled after the others, as their tokens are, also behind a space.",
         note="none"),
    _row(
        "seed", BOTH, _OPENAI, integer(INT64_MIN, INT64_MAX),
        "The same seed and request give the same answer; choice i uses seed + i.", note="drawn",
    ),
    _row(
        "n", BOTH, _OPENAI, integer(1, MAX_CHOICES),
        f"Choices for each prompt. Over all prompts at most {MAX_REQUEST_CHOICES}.", default=1,
    ),
    _row("best_of", BOTH, _OPENAI, integer(1, MAX_CHOICES), "Must equal n.", note="n"),
)  # fmt: skip

_LENGTH_ROWS = (
    _row("max_tokens", CHAT, _OPENAI, MAX_TOKENS, "Most tokens of a choice.", note=_CONTEXT),
    _row("max_tokens", COMPLETION, _OPENAI, MAX_TOKENS, "Most tokens of a choice; 0 only with echo.",
         default=DEFAULT_COMPLETION_TOKENS),
    _row("max_completion_tokens", CHAT, _OPENAI, MAX_TOKENS, "Overrides max_tokens.", note="max_tokens"),
    _row("max_completion_tokens", COMPLETION, _VLLM, MAX_TOKENS, "Overrides max_tokens; 0 only with echo.",
         note="max_tokens"),
    _row("min_tokens", BOTH, _VLLM, integer(0, INT32_MAX),
         "No stop before this many tokens; not over max_tokens.", default=0),
    _row("stop", BOTH, _OPENAI, shapes.STOP, "Texts that end a choice, before them.", note="none"),
    _row("include_stop_str_in_output", BOTH, _VLLM, FLAG, "The text ends with what stopped it.", default=False),
    _row("stop_token_ids", BOTH, _VLLM, shapes.STOP_TOKEN_IDS, "Tokens that end a choice, beside the model's own.",
         note="none"),
    _row("ignore_eos", BOTH, _VLLM, FLAG, "The model's own end tokens end nothing.", default=False),
)  # fmt: skip

_RESPONSE_ROWS = (
    _row("stream", BOTH, _OPENAI, FLAG, "Server-sent events, one a token.", default=False),
    _row("stream_options", BOTH, _OPENAI, shapes.STREAM_OPTIONS, "Needs stream: true.", note="none"),
    _row("logprobs", CHAT, _OPENAI, FLAG, "The log probability of each token.", default=False),
    _row("top_logprobs", CHAT, _OPENAI, TOP_LOGPROBS, "The most probable tokens at each place. Needs logprobs.",
         default=0),
    _row("logprobs", COMPLETION, _OPENAI, TOP_LOGPROBS,
         "As many of the most probable tokens; with echo for the prompt, too.",
         note="none"),
    _row("prompt_logprobs", BOTH, _VLLM, TOP_LOGPROBS,
         "The log probability of each prompt token, and of as many best ones; streamed in the first event.",
         note="none"),
    _row("logprob_token_ids", BOTH, _VLLM, shapes.LOGPROB_TOKEN_IDS,
         "Tokens that are listed at each place, in this order, instead of the most probable. Needs logprobs, not echo.",
         note="the most probable"),
    _row("return_tokens_as_token_ids", BOTH, _VLLM, FLAG,
         "Tokens in logprobs are named token_id:N, which tells those with equal texts apart.", default=False),
    _row("return_token_ids", BOTH, _VLLM, FLAG, "Adds token_ids to each choice, and prompt_token_ids.", default=False),
    _row("skip_special_tokens", BOTH, _VLLM, FLAG, "Special tokens are no text.", default=True),
    _row("response_format", BOTH, _OPENAI, shapes.RESPONSE_FORMAT,
         "The text is JSON, or JSON of a schema, strict or not.", note='`{"type": "text"}`'),
    _row("structured_outputs", BOTH, _VLLM, shapes.STRUCTURED_OUTPUTS,
         "The text keeps to a JSON Schema, a regular expression, one of several texts, or a Lark or GBNF grammar.",
         note="none"),
)  # fmt: skip

_SERVING_ROWS = (
    _row(
        "priority",
        BOTH,
        _VLLM,
        PRIORITY,
        "The higher comes first within a tenant (vLLM: the lower). Clamped to -3 to 3, or to the tenant's highest.",
        default=0,
    ),
    _row(
        "prompt_cache_key",
        BOTH,
        _OPENAI,
        TEXT,
        "Requests of a tenant with the same key go to the same workers while those are not much busier.",
        note="none",
    ),
    _row("cache_salt", BOTH, _VLLM, TEXT, "Only requests with the same salt share cached pages.", note="the tenant's"),
)


def _alias(
    name: str,
    endpoints: frozenset[FieldEndpoint],
    origin: FieldOrigin,
    shape: Scalar | Shape,
    target: str,
    *,
    neutral: tuple[object, ...] = (),
    more: str = "",
) -> RequestField:
    return RequestField(
        name,
        endpoints,
        FieldKind.ALIAS,
        origin,
        f"Another name of {target}.{more}",
        shape,
        default_note=target,
        neutral=neutral,
        target=target,
    )


_ALIAS_ROWS = (
    _alias("min_new_tokens", BOTH, _SGLANG, integer(0, INT32_MAX), "min_tokens"),
    _alias("no_stop_trim", BOTH, _SGLANG, FLAG, "include_stop_str_in_output"),
    _alias("return_prompt_token_ids", CHAT, _SGLANG, FLAG, "return_token_ids"),
    _alias("extra_key", BOTH, _SGLANG, TEXT, "cache_salt"),
    _alias("n_predict", BOTH, _LLAMA, MAX_TOKENS, "max_tokens", neutral=(-1,),
           more=" -1: to the end of the context, unless that has a value."),
    _alias("guided_json", BOTH, _VLLM, shapes.JSON_SCHEMA, "structured_outputs.json"),
    _alias("guided_regex", BOTH, _VLLM, TEXT, "structured_outputs.regex"),
    _alias("guided_choice", BOTH, _VLLM, shapes.STRINGS, "structured_outputs.choice"),
    _alias("guided_grammar", BOTH, _VLLM, TEXT, "structured_outputs.grammar"),
    _alias("guided_whitespace_pattern", BOTH, _VLLM, TEXT, "structured_outputs.whitespace_pattern"),
    _alias("regex", BOTH, _SGLANG, TEXT, "structured_outputs.regex"),
    _alias("ebnf", BOTH, _SGLANG, TEXT, "structured_outputs.grammar"),
    _alias("json_schema", BOTH, _SGLANG, shapes.JSON_SCHEMA, "structured_outputs.json"),
    _alias("grammar", BOTH, _LLAMA, TEXT, "structured_outputs.grammar", neutral=("",)),
    _alias("thinking_budget_tokens", CHAT, _LLAMA, integer(-1, INT32_MAX), "thinking_token_budget"),
    _alias("reasoning_budget_tokens", CHAT, _LLAMA, integer(-1, INT32_MAX), "thinking_token_budget"),
    _alias("n_cmpl", BOTH, _LLAMA, integer(1, MAX_CHOICES), "n"),
    _alias("repeat_penalty", BOTH, _LLAMA, number(0.0, 2.0, exclusive_low=True), "repetition_penalty"),
    _alias("return_tokens", BOTH, _LLAMA, FLAG, "return_token_ids"),
)  # fmt: skip

HONOURED = (
    _PROMPT_ROWS
    + _TOOL_ROWS
    + _TEMPLATE_ROWS
    + _REASONING_ROWS
    + _SAMPLING_ROWS
    + _LENGTH_ROWS
    + _RESPONSE_ROWS
    + _SERVING_ROWS
    + _ALIAS_ROWS
)
