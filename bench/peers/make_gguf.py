"""Converts a model of `bench.harness.random_models` to a GGUF file, in bfloat16 for llama.cpp or float16 for OpenVINO.

Runs in a peer's environment of `install.sh`, which has `gguf` and numpy but no code of Baton:

    DIRECTORY/llama/bin/python bench/peers/make_gguf.py MODEL_DIRECTORY FILE.gguf [--float16]

Supports only Qwen2's tensor names. In bfloat16 tensors keep their bits: numpy has no bfloat16, so safetensors is parsed
here. OpenVINO GenAI reads no bfloat16 from GGUF; it computes in it all the same.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True)
class Bf16Tensor:
    """A tensor. `bits`: bit patterns of its bfloat16 numbers, in its shape."""

    name: str
    bits: np.ndarray

    def as_float32(self) -> np.ndarray:
        """The numbers, exactly, in the same shape."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


def read_tensors(path: Path) -> Iterator[Bf16Tensor]:
    """Yields all tensors of a safetensors file. Raises `ValueError` for one that is not bfloat16."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_bytes)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        first, end = entry["data_offsets"]
        yield Bf16Tensor(name, data[first:end].view(np.uint16).reshape(entry["shape"]))


def name_in_gguf(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`. Raises `KeyError` for an unknown part."""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def write(directory: Path, path: Path, *, float16: bool = False) -> None:
    """Writes config, tokenizer and tensors into `path`; matrices in bfloat16, or in float16."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen2":
        raise SystemExit(f"only qwen2 is known here, not {config['model_type']}")
    import gguf  # in the peer's environment only; the functions above do not need it

    writer = gguf.GGUFWriter(str(path), "qwen2")
    kinds = gguf.LlamaFileType
    _write_config(writer, config, kinds.MOSTLY_F16 if float16 else kinds.MOSTLY_BF16)
    _write_tokenizer(writer, gguf.TokenType, json.loads((directory / "tokenizer.json").read_text(encoding="utf-8")))
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer.add_chat_template(settings["chat_template"])
    for tensor in read_tensors(directory / "model.safetensors"):
        if tensor.bits.ndim == 1:  # norms and biases are float32 in this format
            writer.add_tensor(name_in_gguf(tensor.name), tensor.as_float32())
        elif float16:
            writer.add_tensor(name_in_gguf(tensor.name), tensor.as_float32().astype(np.float16))
        else:
            bits = np.ascontiguousarray(tensor.bits).view(np.uint8)
            writer.add_tensor(name_in_gguf(tensor.name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: dict[str, Any], file_type: int) -> None:
    writer.add_name("random")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(file_type)


def _write_tokenizer(writer: Any, kinds: Any, tokenizer: dict[str, Any]) -> None:
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    types = [kinds.CONTROL if id in special else kinds.NORMAL for id in range(len(words))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--float16", action="store_true")
    flags = parser.parse_args()
    write(flags.directory, flags.file, float16=flags.float16)


if __name__ == "__main__":
    main()
