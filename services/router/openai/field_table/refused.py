"""The fields that a response must not ignore, and that Baton does not support: a 400 names them.

Neutral values pass, because clients send defaults.
"""

from __future__ import annotations

from baton.services.router.openai.field_table.field import (
    BOTH,
    CHAT,
    COMPLETION,
    FieldEndpoint,
    FieldKind,
    FieldOrigin,
    RequestField,
)

_LATER = "is not supported yet"
_NEVER = "is not supported"
_SAMPLER = "is not a setting of this sampler"
_CONSTRAINT = "is not supported: a grammar holds from the first token on"
_TOOLS = "is not supported; use tools"
_REASONING = "is not supported"
_OF_CHATS = "is not supported: the reasoning of a completion is part of its text"
_MEDIA = "is not supported: images come as image_url parts of messages, and text is written"
_ROUTING = "is not for clients: workers are chosen by the router"

_OFF = (False,)

Row = tuple[str, frozenset[FieldEndpoint], str, tuple[object, ...]]

_OPENAI_ROWS: tuple[Row, ...] = (
    ("modalities", CHAT, _MEDIA, (["text"],)),
    ("audio", CHAT, _MEDIA, ()),
    ("web_search_options", CHAT, _NEVER, ()),
    ("moderation", CHAT, _NEVER, ()),
    ("suffix", COMPLETION, f"{_NEVER}; write the model's own tokens for a gap into prompt", ("",)),
)

_VLLM_ROWS: tuple[Row, ...] = (
    ("return_prompt_text", BOTH, _LATER, _OFF),
    ("thinking_token_budget", COMPLETION, _OF_CHATS, (-1,)),
    ("continue_final_message", COMPLETION, _NEVER, _OFF),
    ("chat_template", CHAT, f"{_NEVER}: the model's own is used", ()),
    ("echo", CHAT, _NEVER, _OFF),
    ("use_beam_search", BOTH, f"{_SAMPLER}; use n", _OFF),
    ("length_penalty", BOTH, _SAMPLER, (1.0,)),
    ("early_stopping", BOTH, _SAMPLER, _OFF),
    ("watermarking", BOTH, _SAMPLER, _OFF),
    ("repetition_detection", BOTH, _SAMPLER, ()),
    ("logits_processors", BOTH, _SAMPLER, ()),
    ("vllm_xargs", BOTH, _NEVER, ()),
    ("spaces_between_special_tokens", BOTH, _NEVER, (True,)),
    ("stream_interval", BOTH, "is not supported: a stream has one event a token", (1,)),
    ("prompt_embeds", BOTH, _NEVER, ()),
    ("media_io_kwargs", BOTH, _MEDIA, ()),
    ("mm_processor_kwargs", BOTH, _MEDIA, ()),
    ("return_mm_kwargs", BOTH, _MEDIA, (True, False)),
    ("kv_transfer_params", BOTH, _ROUTING, ()),
    ("ec_transfer_params", BOTH, _ROUTING, ()),
    ("return_weight_versions", BOTH, _NEVER, _OFF),
    ("routed_experts_prompt_start", BOTH, _NEVER, (0,)),
    ("return_token_offsets", BOTH, _NEVER, _OFF),
)

_SGLANG_ROWS: tuple[Row, ...] = (
    ("stop_regex", BOTH, f"{_LATER}; use stop", ()),
    ("stream_reasoning", CHAT, "is not supported: a stream has one event a token", (True,)),
    ("task", CHAT, _NEVER, ()),
    ("input_ids", CHAT, "is not supported; post token ids as prompt to /v1/completions", ()),
    ("return_cached_tokens_details", BOTH, "is not supported; usage has cached_tokens", _OFF),
    ("return_meta_info", CHAT, _NEVER, _OFF),
    ("return_hidden_states", BOTH, _NEVER, _OFF),
    ("return_routed_experts", BOTH, _NEVER, _OFF),
    ("routed_experts_start_len", BOTH, _NEVER, (0,)),
    ("lora_path", BOTH, _NEVER, ()),
    ("session_params", BOTH, _NEVER, ()),
    ("custom_params", BOTH, _SAMPLER, ({},)),
    ("custom_logit_processor", BOTH, _SAMPLER, ()),
    ("images_config", BOTH, _MEDIA, ()),
    ("max_dynamic_patch", CHAT, _MEDIA, ()),
    ("min_dynamic_patch", CHAT, _MEDIA, ()),
    ("use_audio_in_video", CHAT, _MEDIA, _OFF),
    ("ngram_corpus_id", BOTH, _NEVER, ()),
    ("bootstrap_host", BOTH, _ROUTING, ()),
    ("bootstrap_port", BOTH, _ROUTING, ()),
    ("bootstrap_room", BOTH, _ROUTING, ()),
    ("routed_dp_rank", BOTH, _ROUTING, ()),
    ("disagg_prefill_dp_rank", BOTH, _ROUTING, ()),
    ("data_parallel_rank", BOTH, _ROUTING, ()),
)

_LLAMA_ROWS: tuple[Row, ...] = (
    ("grammar_lazy", BOTH, _CONSTRAINT, _OFF),
    ("grammar_triggers", BOTH, _CONSTRAINT, ([],)),
    ("grammar_type", BOTH, _CONSTRAINT, ()),
    ("preserved_tokens", BOTH, _CONSTRAINT, ([],)),
    ("thinking_budget_tokens", COMPLETION, _OF_CHATS, (-1,)),
    ("reasoning_budget_tokens", COMPLETION, _OF_CHATS, (-1,)),
    ("reasoning_budget_message", BOTH, _REASONING, ("",)),
    ("reasoning_budget_start_tag", BOTH, _REASONING, ("",)),
    ("reasoning_budget_end_tag", BOTH, _REASONING, ("",)),
    ("reasoning_budget_end_tags", BOTH, _REASONING, ([],)),
    ("reasoning_control", BOTH, _REASONING, _OFF),
    ("reasoning_format", COMPLETION, _OF_CHATS, ("none", "auto")),
    ("parse_tool_calls", BOTH, _TOOLS, (True, False)),
    ("chat_format", BOTH, _NEVER, ()),
    ("chat_parser", BOTH, _NEVER, ("",)),
    ("generation_prompt", BOTH, _NEVER, ("",)),
    ("message_delimiters", BOTH, _NEVER, ()),
    ("n_probs", BOTH, "is not supported; use logprobs", (0,)),
    ("post_sampling_probs", BOTH, "is not supported: logprobs are those of the model", _OFF),
    ("typical_p", BOTH, _SAMPLER, (1.0,)),
    ("mirostat", BOTH, _SAMPLER, (0,)),
    ("mirostat_tau", BOTH, _SAMPLER, (5.0,)),
    ("mirostat_eta", BOTH, _SAMPLER, (0.1,)),
    ("dry_multiplier", BOTH, _SAMPLER, (0.0,)),
    ("dry_base", BOTH, _SAMPLER, (1.75,)),
    ("dry_allowed_length", BOTH, _SAMPLER, (2,)),
    ("dry_penalty_last_n", BOTH, _SAMPLER, (-1, 0)),
    ("dry_sequence_breakers", BOTH, _SAMPLER, ()),
    ("xtc_probability", BOTH, _SAMPLER, (0.0,)),
    ("xtc_threshold", BOTH, _SAMPLER, (0.1,)),
    ("top_n_sigma", BOTH, _SAMPLER, (-1.0,)),
    ("dynatemp_range", BOTH, _SAMPLER, (0.0,)),
    ("dynatemp_exponent", BOTH, _SAMPLER, (1.0,)),
    ("adaptive_target", BOTH, _SAMPLER, (-1.0,)),
    ("adaptive_decay", BOTH, _SAMPLER, (0.9,)),
    ("min_keep", BOTH, _SAMPLER, (0,)),
    ("repeat_last_n", BOTH, f"{_SAMPLER}: penalties cover prompt and answer", (-1,)),
    ("samplers", BOTH, f"{_SAMPLER}: their order is fixed", ()),
    ("lora", BOTH, _NEVER, ([],)),
    ("input_prefix", BOTH, _NEVER, ("",)),
    ("input_suffix", BOTH, _NEVER, ("",)),
    ("input_extra", BOTH, _NEVER, ([],)),
    ("images", BOTH, _MEDIA, ([],)),
    ("n_indent", BOTH, _NEVER, (0,)),
    ("t_max_predict_ms", BOTH, "is not supported; use max_tokens", (-1, 0)),
    ("t_max_prompt_ms", BOTH, "is not supported; hang up instead", (-1, 0)),
    ("cache_prompt", BOTH, "is not supported; a cache_salt of its own shares nothing", (True,)),
    ("id_slot", BOTH, _ROUTING, (-1,)),
)


def _rows(origin: FieldOrigin, rows: tuple[Row, ...]) -> tuple[RequestField, ...]:
    return tuple(
        RequestField(name, endpoints, FieldKind.REFUSED, origin, meaning, neutral=neutral)
        for name, endpoints, meaning, neutral in rows
    )


REFUSED = (
    *_rows(FieldOrigin.OPENAI, _OPENAI_ROWS),
    *_rows(FieldOrigin.VLLM, _VLLM_ROWS),
    *_rows(FieldOrigin.SGLANG, _SGLANG_ROWS),
    *_rows(FieldOrigin.LLAMA_SERVER, _LLAMA_ROWS),
)
