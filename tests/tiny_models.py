"""Tiny random models of real architectures, saved as Hugging Face directories, so that tests download nothing.

Weights are spread so that greedy decoding depends on the whole context. The vocabulary is the bundled model's.
`add_tokenizer` copies its tokenizer beside the weights, so that a router can serve such a directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from baton.bundled import MODEL_DIR

VOCAB_SIZE: int = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))["vocab_size"]
WINDOW = 24
MAX_POSITIONS = 1024
_SPREAD = 0.08


def small_shape(**more: Any) -> dict[str, Any]:
    """The common part of every config here, with `more` on top."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    return {**shape, **more}


_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
_LATENT_EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


def latent_shape(**more: Any) -> dict[str, Any]:
    """`small_shape` for multi-head latent attention."""
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
    shape = small_shape(num_key_value_heads=4, q_lora_rank=24, **latent)
    del shape["head_dim"]
    return {**shape, **more}


FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**small_shape()),
    "qwen2": lambda: transformers.Qwen2Config(**small_shape()),
    "qwen3": lambda: transformers.Qwen3Config(**small_shape(tie_word_embeddings=True)),
    "mistral": lambda: transformers.MistralConfig(**small_shape(sliding_window=WINDOW)),
    "gemma2": lambda: transformers.Gemma2Config(
        **small_shape(sliding_window=WINDOW, layer_types=_LAYERS, query_pre_attn_scalar=16)
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **small_shape(sliding_window=WINDOW, layer_types=_LAYERS, query_pre_attn_scalar=16)
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **small_shape(**_EXPERTS, num_local_experts=4, sliding_window=WINDOW, layer_types=_LAYERS[:2])
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **small_shape(**_EXPERTS, num_experts=4, moe_intermediate_size=32)
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**latent_shape(**_LATENT_EXPERTS, q_lora_rank=None)),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**latent_shape(**_LATENT_EXPERTS)),
}

LATENT_FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    **{family: FAMILIES[family] for family in ("deepseek_v2", "deepseek_v3")},
    "axk1": lambda: transformers.AXK1Config(**latent_shape(**_LATENT_EXPERTS)),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**latent_shape(**_LATENT_EXPERTS)),
    "minicpm3": lambda: transformers.MiniCPM3Config(**latent_shape(dim_model_base=64, scale_emb=1)),
    "youtu": lambda: transformers.YoutuConfig(**latent_shape()),
}
"""Types whose pages keep latents."""


def save_random_model(family: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a random model of `family` into `directory` and returns it."""
    return save_random_config(FAMILIES[family](), directory, seed=seed, dtype=dtype)


def save_random_config(
    config: transformers.PreTrainedConfig, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Writes a random model of `config` into `directory` and returns it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _SPREAD
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(directory)
    return directory


def add_tokenizer(directory: Path) -> Path:
    """Copies the bundled tokenizer and chat template into a model directory and returns it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(MODEL_DIR / name, directory / name)
    return directory
