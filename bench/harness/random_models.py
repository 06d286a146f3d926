"""Models of a named shape with random weights, saved as Hugging Face directories.

Called by the experiments and by `bench/peers`, so every server loads the same directory through its own loader.

    python -m bench.harness.random_models qwen2.5-0.5b DIRECTORY
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import logging as hf_logging

from bench.harness.model_shapes import SHAPES, ModelShape

END_OF_TEXT = "<|endoftext|>"
_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
_CONFIGS: dict[str, type[transformers.PreTrainedConfig]] = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
}


def config_of(shape: ModelShape) -> transformers.PreTrainedConfig:
    """The transformers config of a shape."""
    return _CONFIGS[shape.family](
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
    )


def save_random_model(shape: ModelShape, directory: Path, *, seed: int = 0, device: str = "cpu") -> Path:
    """Writes bfloat16 weights, config and tokenizer into `directory` and returns it.

    `device` draws the numbers: a GPU those of billions of weights within seconds, and others than the CPU.
    """
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=0)
    hf_logging.disable_progress_bar()
    model.save_pretrained(directory)
    make_tokenizer(shape.vocab_size).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "chat_template": _TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Bytes, one merge, and invented words up to `vocab_size`: every id of the model is a token with a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [END_OF_TEXT, *alphabet, "th"]
    words += [f"w{number}x" for number in range(vocab_size - len(words))]
    vocabulary = {word: id for id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    save_random_model(SHAPES[flags.shape], flags.directory, seed=flags.seed)


if __name__ == "__main__":
    main()
