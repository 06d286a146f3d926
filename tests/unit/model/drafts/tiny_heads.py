"""Drafting heads in the layout of published ones, and their formula as published, written without Baton's code.

The reference keeps the published order: token i+1 beside the feature of token i, at position i. Weights are random, or
fitted to what a target generates, so that drafts are right now and then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.tiny_models import VOCAB_SIZE

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
HEAD_DIM = HIDDEN // HEADS
KINDS = ("eagle", "eagle3", "mtp", "mtp of 3 layers")
NUM_DEPTHS = 3
LAYERS = {"eagle": "layers.0", "eagle3": "midlayer", "mtp": "model.mtp_layers.0"}
LAYER_IDS = [0, 1]
"""Layers of a target with three whose output EAGLE-3 reads."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS},
}


def random_head(kind: str, *, seed: int = 7, num_drafted_ids: int | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a head under their published names. `num_drafted_ids`: EAGLE-3 knows so many tokens; None: all."""
    if kind == KINDS[3]:
        layers = [(depth, random_head("mtp", seed=seed + depth)) for depth in range(NUM_DEPTHS)]
        return {_at_depth(name, depth): tensor for depth, layer in layers for name, tensor in layer.items()}
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        return torch.randn(num_out, num_in, generator=generator) * num_in**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=generator)

    layer, width = LAYERS[kind], 2 * HIDDEN if kind == "eagle3" else HIDDEN
    tensors = {
        f"{layer}.self_attn.q_proj.weight": matrix(HIDDEN, width),
        f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        f"{layer}.post_attention_layernorm.weight": norm(),
    }
    if kind == "eagle":
        return tensors | {"fc.weight": matrix(HIDDEN, 2 * HIDDEN), "fc.bias": matrix(HIDDEN, 1)[:, 0] * 0.1}
    if kind == "mtp":
        norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
        biases = {"q": HIDDEN, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        tensors |= {f"{layer}.{name}.weight": norm() for name in norms}
        tensors |= {f"{layer}.self_attn.{side}_proj.bias": matrix(size, 1)[:, 0] for side, size in biases.items()}
        return tensors | {f"{layer}.input_proj.weight": matrix(HIDDEN, 2 * HIDDEN)}
    num_ids = VOCAB_SIZE if num_drafted_ids is None else num_drafted_ids
    tensors |= {
        "fc.weight": matrix(HIDDEN, len(LAYER_IDS) * HIDDEN),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(num_ids, HIDDEN),
    }
    if num_drafted_ids is not None:
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[:num_ids].sort().values
        known = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, ids, True)
        tensors |= {"d2t": ids - torch.arange(num_ids), "t2d": known}
    return tensors


def save_head(tensors: dict[str, torch.Tensor], directory: Path, **config: Any) -> Path:
    """Writes a head as it is published. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(plain, directory / "model.safetensors")
    return directory


@dataclass
class HeadReference:
    """A head beside its target, a module of transformers."""

    kind: str
    tensors: dict[str, torch.Tensor]
    target: Any

    @classmethod
    def of(cls, kind: str, tensors: dict[str, torch.Tensor], target: Path) -> HeadReference:
        module = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        return cls(kind, tensors, module.requires_grad_(False))

    def features(self, tokens: list[int]) -> torch.Tensor:
        """The target's hidden states that the head reads: [tokens, width]."""
        hidden = self.target(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
        if self.kind != "eagle3":
            return hidden[-1][0]
        return torch.cat([hidden[index + 1][0] for index in LAYER_IDS], dim=-1) @ self.tensors["fc.weight"].T

    @property
    def has_depths(self) -> bool:
        return self.kind == KINDS[3]

    def at_depth(self, depth: int) -> HeadReference:
        """One layer of several, as a head."""
        own = {name: _at_depth(name, depth) for name in random_head("mtp")}
        return HeadReference("mtp", {name: self.tensors[at] for name, at in own.items()}, self.target)

    def run(self, tokens: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the target's tokens, and next features, after each of `tokens`; features are of those before."""
        get, embeds = self.tensors.__getitem__, self.target.get_input_embeddings()(torch.tensor(tokens))
        layer = LAYERS[self.kind]
        if self.kind == "eagle":
            residual = torch.cat([embeds, features], -1) @ get("fc.weight").T + get("fc.bias")
            joined = residual
        elif self.kind == "mtp":
            of_feature = rms(features, get(f"{layer}.hidden_layernorm.weight"))
            of_token = rms(embeds, get(f"{layer}.token_layernorm.weight"))
            residual = torch.cat([of_feature, of_token], -1) @ get(f"{layer}.input_proj.weight").T
            joined = rms(residual, get(f"{layer}.input_layernorm.weight"))
        else:
            residual = features
            normed = [
                rms(x, get(f"midlayer.{name}.weight"))
                for x, name in ((embeds, "input_layernorm"), (features, "hidden_norm"))
            ]
            joined = torch.cat(normed, -1)
        seen = self._attention(f"{layer}.self_attn", joined)
        residual = residual + seen @ get(f"{layer}.self_attn.o_proj.weight").T
        hidden = rms(residual, get(f"{layer}.post_attention_layernorm.weight"))
        gate, up = (hidden @ get(f"{layer}.mlp.{side}_proj.weight").T for side in ("gate", "up"))
        residual = residual + (torch.nn.functional.silu(gate) * up) @ get(f"{layer}.mlp.down_proj.weight").T
        if self.kind == "eagle":
            return self.target.lm_head(residual), residual
        if self.kind == "mtp":
            residual = rms(residual, get(f"{layer}.final_layernorm.weight"))
            return self.target.lm_head(residual), residual
        logits = rms(residual, get("norm.weight")) @ get("lm_head.weight").T
        if "d2t" in self.tensors:
            ids = torch.arange(len(get("d2t"))) + get("d2t")
            logits = torch.full((len(tokens), VOCAB_SIZE), -torch.inf).index_copy(1, ids, logits)
        return logits, residual

    def greedy_drafts(self, tokens: list[int], count: int) -> tuple[int, ...]:
        """The drafts behind `tokens`, each from everything before it, without a cache."""
        features, read, drafts = self.features(tokens[:-1]), tokens[1:], []
        for depth in range(count) if self.has_depths else ():
            logits, features = self.at_depth(depth).run(read, features)
            drafts.append(int(logits[-1].argmax()))
            read = [*read[1:], drafts[-1]]
        for _ in range(0 if self.has_depths else count):
            logits, outputs = self.run(read, features)
            drafts.append(int(logits[-1].argmax()))
            read, features = [*read, drafts[-1]], torch.cat([features, outputs[-1:]])
        return tuple(drafts)

    def fit(self, texts: list[list[int]], num_steps: int = 120) -> None:
        """Trains the head to say what follows in `texts`."""
        trained = [tensor.requires_grad_() for tensor in self.tensors.values() if tensor.is_floating_point()]
        optimizer = torch.optim.Adam(trained, lr=5e-3)
        for step in range(num_steps):
            loss = self._loss(texts[step % len(texts)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for tensor in trained:
            tensor.requires_grad_(False)

    def _loss(self, text: list[int]) -> torch.Tensor:
        """Cross entropy of the token behind each that a layer reads; the sum over the layers of several."""
        if not self.has_depths:
            return _cross_entropy(self.run(text[1:-1], self.features(text[:-2]))[0], text[2:])
        features, total = self.features(text[: -1 - NUM_DEPTHS]), torch.zeros(())
        for depth in range(NUM_DEPTHS):
            read = text[1 + depth : depth - NUM_DEPTHS]
            logits, features = self.at_depth(depth).run(read, features)
            total = total + _cross_entropy(logits, text[2 + depth :][: len(read)])
        return total

    def _attention(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        heads = {
            side: self._projected(f"{name}.{side}_proj", joined).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
            for side in "qkv"
        }
        query, key = rotate(heads["q"]), rotate(heads["k"])
        key, value = (side.repeat_interleave(HEADS // KV_HEADS, 0) for side in (key, heads["v"]))
        scores = query @ key.transpose(1, 2) * HEAD_DIM**-0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return (weights @ value).transpose(0, 1).flatten(1)

    def _projected(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(joined, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def _at_depth(name: str, depth: int) -> str:
    return name.replace(LAYERS["mtp"], f"model.mtp_layers.{depth}")


def _cross_entropy(logits: torch.Tensor, following: list[int]) -> torch.Tensor:
    """Over the tokens that the head knows."""
    wanted = torch.tensor(following)
    known = torch.isfinite(logits[torch.arange(len(wanted)), wanted])
    return torch.nn.functional.cross_entropy(logits[known], wanted[known])


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalisation."""
    return x * (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt() * weight


def rotate(heads: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [heads, tokens, dim], from position 0."""
    half = HEAD_DIM // 2
    angles = torch.arange(heads.shape[1])[:, None] * CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
