"""Trains an EAGLE-3 head for the bundled model: a seeded run of some four CPU minutes.

    python -m scripts.train_bundled_head --out baton/bundled/head

Text: half from ``bundled_corpus.py``, half the model's own answers, greedy and drawn at 0.7. The head learns the model's
distribution of the next token from hidden states after three layers, unrolled on its own outputs as when it drafts
(EAGLE-3's training-time test, arXiv:2503.01840). Embeddings and output head are the model's, and stay. The weights are
rounded to bfloat16, measured on answers of another seed, and written in the layout of published heads.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, silu
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from baton.bundled import MODEL_DIR
from scripts.bundled_corpus import START, chat, render
from scripts.train_bundled_model import EVAL_SEED_OFFSET, PackedText, log, schedule

LAYER_IDS = (0, 2, 4)  # layers of the model whose output the head reads
UNROLL = 4  # drafts behind one another in a training step
DEPTH_WEIGHT = 0.8  # of each further draft in the loss
ROWS, LENGTH = 4, 256  # of a step, half of them answers
ANSWERS, ANSWER_BATCH, ANSWER_TOKENS = 768, 64, 96
HELD_OUT_ANSWERS = 64


class Head(nn.Module):
    """An EAGLE-3 head of the shape of the model's layers. Names of parameters are those of published heads."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        config = model.config
        self.num_heads, self.num_kv_heads, self.head_dim = 6, config.num_key_value_heads, config.head_dim
        self.hidden, self.eps, self.theta = config.hidden_size, 1e-6, 10000.0
        inner = config.intermediate_size
        self.fc = nn.Linear(len(LAYER_IDS) * self.hidden, self.hidden, bias=False)
        self.norm = Norm(self.hidden)
        layer: Any = nn.Module()
        layer.input_layernorm, layer.hidden_norm = Norm(self.hidden), Norm(self.hidden)
        layer.post_attention_layernorm = Norm(self.hidden)
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        for side, count in zip("qkv", sizes, strict=True):
            layer.self_attn.add_module(f"{side}_proj", nn.Linear(2 * self.hidden, count * self.head_dim, bias=False))
        layer.self_attn.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden, bias=False)
        for name in ("gate", "up"):
            layer.mlp.add_module(f"{name}_proj", nn.Linear(self.hidden, inner, bias=False))
        layer.mlp.down_proj = nn.Linear(inner, self.hidden, bias=False)
        self.midlayer: Any = layer

    def unroll(self, embeds: torch.Tensor, features: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Outputs [rows, tokens, hidden] of `depth` drafts behind one another, before the model's output head.

        `features` [rows, tokens, hidden] are of the positions before `embeds`. At depth j a token sees keys of true
        features up to j positions before it, and those of the last j drafts of its own chain.
        """
        chain: list[tuple[torch.Tensor, torch.Tensor]] = []
        outputs = []
        for _ in range(depth):
            output, keys_and_values = self._layer(embeds, features, chain)
            chain.append(keys_and_values)
            outputs.append(self.norm(output))
            features = torch.cat([features[:, :1], output[:, :-1]], dim=1)
        return outputs

    def _layer(
        self, embeds: torch.Tensor, features: torch.Tensor, chain: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        part = self.midlayer
        joined = torch.cat([part.input_layernorm(embeds), part.hidden_norm(features)], dim=-1)
        query, key, value = (
            part.self_attn.get_submodule(f"{side}_proj")(joined).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for side in "qkv"
        )
        repeats = self.num_heads // self.num_kv_heads
        key, value = (side.repeat_interleave(repeats, 1) for side in (self._rotate(key), value))
        seen = self._attend(self._rotate(query), [*chain, (key, value)])
        hidden = features + part.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        normed = part.post_attention_layernorm(hidden)
        hidden = hidden + part.mlp.down_proj(silu(part.mlp.gate_proj(normed)) * part.mlp.up_proj(normed))
        return hidden, (key, value)

    def _attend(self, query: torch.Tensor, chain: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Attention to true keys, `chain[0]`, up to as many positions back as there are drafts, then to each draft."""
        depth, num_tokens = len(chain) - 1, query.shape[2]
        (key, value), drafted = chain[0], chain[1:]
        scale = self.head_dim**-0.5
        hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1 - depth)
        hidden[:depth, 0] = False  # the first tokens have no whole chain; they are not part of the loss
        scores = [(query @ key.mT * scale).masked_fill(hidden, -torch.inf)]
        values = []
        for back, (own_key, own_value) in zip(range(depth - 1, -1, -1), drafted, strict=True):
            scores.append((query * own_key.roll(back, 2)).sum(-1, keepdim=True) * scale)
            values.append(own_value.roll(back, 2))
        weights = torch.cat(scores, dim=-1).softmax(-1)
        seen = weights[..., :num_tokens] @ value
        for number, own_value in enumerate(values):
            seen = seen + weights[..., num_tokens + number, None] * own_value
        return seen

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        half = self.head_dim // 2
        angles = torch.arange(heads.shape[2])[:, None] * self.theta ** (-torch.arange(half) / half)
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )


class Norm(nn.Module):
    """RMSNorm with a factor for each feature."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight.shape, self.weight, 1e-6)


def prompts(seed: int) -> Iterator[str]:
    """Questions of the corpus, as the model reads them: chats up to the answer."""
    rng = random.Random(seed)
    while True:
        turns = chat(rng)
        first = next(index for index, turn in enumerate(turns) if turn["role"] == "assistant")
        yield render(turns[:first]) + f"{START}assistant\n"


def answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, count: int, greedy: bool
) -> list[tuple[list[int], int]]:
    """Token ids of `count` chats that the model ends itself, and how many of them are the prompt's."""
    found: list[tuple[list[int], int]] = []
    stream = prompts(seed)
    torch.manual_seed(seed)
    while len(found) < count:
        texts = list(itertools.islice(stream, min(ANSWER_BATCH, count - len(found))))
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        draw = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 0.7}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, **draw)
        for row, generated in zip(rows, out[:, longest:].tolist(), strict=True):
            end = generated.index(2) + 1 if 2 in generated else len(generated)
            found.append((row + generated[:end], len(row)))
    return found


class AnswerText:
    """Answers one after another, cut into rows, again and again."""

    def __init__(self, texts: list[list[int]], seed: int) -> None:
        self._texts, self._rng = texts, random.Random(seed)
        self._ids: list[int] = []

    def take(self, rows: int, length: int) -> torch.Tensor:
        """The next ids: [rows, length]."""
        while len(self._ids) < rows * length:
            self._ids += self._rng.choice(self._texts)
        batch, self._ids = self._ids[: rows * length], self._ids[rows * length :]
        return torch.tensor(batch).view(rows, length)


def run_model(model: Qwen3ForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Captured states [rows, tokens, 3 * hidden] and logits [rows, tokens, vocabulary] of the model."""
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[index + 1] for index in LAYER_IDS], dim=-1), output.logits


def unrolled_logits(
    model: Qwen3ForCausalLM, head: Head, ids: torch.Tensor, captured: torch.Tensor
) -> list[torch.Tensor]:
    """Logits of the token behind `ids[:, 1:]`, at each depth: [rows, tokens - 1, vocabulary]."""
    embeds = model.get_input_embeddings()(ids[:, 1:]).detach()
    outputs = head.unroll(embeds, head.fc(captured)[:, :-1], UNROLL)
    return [model.lm_head(output) for output in outputs]


def loss_of(model: Qwen3ForCausalLM, head: Head, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy to the model's distribution, weighted by depth."""
    captured, logits = run_model(model, ids)
    wanted = logits[:, 1:].softmax(-1)
    total, weight = torch.zeros(()), 1.0
    for depth, drafted in enumerate(unrolled_logits(model, head, ids, captured)):
        total = total + weight * cross_entropy(drafted[:, depth:].flatten(0, 1), wanted[:, depth:].flatten(0, 1))
        weight *= DEPTH_WEIGHT
    return total


def train(
    model: Qwen3ForCausalLM,
    head: Head,
    texts: tuple[PackedText, AnswerText],
    options: argparse.Namespace,
    started: float,
) -> int:
    """Runs the schedule. Returns the number of tokens seen."""
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    recent = []
    for step in range(options.steps):
        ids = torch.cat([text.take(ROWS // 2, LENGTH) for text in texts])
        loss = loss_of(model, head, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = schedule(step / options.steps, options.learning_rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % 25 == 0:
            log(f"step {step + 1} loss {sum(recent) / len(recent):.4f}", started)
            recent.clear()
    num_tokens: int = options.steps * ROWS * LENGTH
    return num_tokens


@torch.no_grad()
def accepted_length(
    model: Qwen3ForCausalLM, head: Head, texts: list[tuple[list[int], int]]
) -> tuple[float, list[float]]:
    """Drafts of a chain of `UNROLL` that greedy answers accept, in the mean, and the share of chains that reach each.

    A chain begins behind every token of an answer that has so many behind it.
    """
    reached, count = [0] * UNROLL, 0
    for text, num_prompt_tokens in texts:
        ids = torch.tensor([text])
        captured, _ = run_model(model, ids)
        drafted = [logits[0].argmax(-1) for logits in unrolled_logits(model, head, ids, captured)]
        starts = torch.arange(num_prompt_tokens - 1, max(num_prompt_tokens, len(text) - UNROLL) - 1)
        alive = torch.ones(len(starts), dtype=torch.bool)
        for depth in range(UNROLL):
            places = starts + depth
            alive = alive & (drafted[depth][places] == ids[0, places + 2])
            reached[depth] += int(alive.sum())
        count += len(starts)
    shares = [number / count for number in reached]
    return sum(shares), shares


def save(head: Head, out: Path, card: str) -> None:
    """Writes the directory in the layout of published heads."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()},
        out / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head.hidden,
        "intermediate_size": head.midlayer.mlp.down_proj.in_features,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.eps,
        "rope_theta": head.theta,
        "vocab_size": 2048,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS)},
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "README.md").write_text(card)


def head_card(
    num_parameters: int,
    num_tokens: int,
    times: tuple[float, float],
    length: tuple[float, list[float]],
    options: argparse.Namespace,
) -> str:
    """The README with the figures of this run. ``times``: minutes of wall and CPU time."""
    shares = ", ".join(f"{share:.2f}" for share in length[1])
    return f"""# The EAGLE-3 head of the bundled model

{num_parameters:,} parameters in bfloat16, in the layout of published heads. Embeddings and output head are the model's. It is for
demonstrations and tests: a model of three million parameters needs no drafts.

| | |
|---|---|
| trained by | `python -m scripts.train_bundled_head --seed {options.seed} --steps {options.steps} --threads {options.threads}` |
| trained on | text generated by `scripts/bundled_corpus.py`, and the model's own answers to its questions |
| tokens seen | {num_tokens:,} |
| time | {times[1]:.1f} minutes of CPU time on {options.threads} threads, {times[0]:.1f} minutes by the wall |
| drafts accepted of chains of {UNROLL}, on greedy answers to questions of another seed | {length[0]:.2f} in the mean; share that reach each place: {shares} |
| licence | Apache-2.0 |
"""


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("baton/bundled/head"))
    parser.add_argument("--steps", type=int, default=220, help=f"optimizer steps of {ROWS * LENGTH} tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak")
    return parser.parse_args()


def main() -> None:
    """Generates answers, trains, measures and saves."""
    options, started = parse_options(), time.monotonic()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval().requires_grad_(False)
    own = [
        answers(model, tokenizer, options.seed + place, ANSWERS // 2, greedy)
        for place, greedy in enumerate((True, False))
    ]
    log(f"{sum(map(len, own))} answers", started)
    torch.manual_seed(options.seed)
    head = Head(model)
    texts = (
        PackedText(tokenizer, options.seed + 3),
        AnswerText([text for part in own for text, _ in part], options.seed),
    )
    num_tokens = train(model, head, texts, options, started)
    times = ((time.monotonic() - started) / 60, time.process_time() / 60)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    held_out = answers(model, tokenizer, options.seed + EVAL_SEED_OFFSET, HELD_OUT_ANSWERS, True)
    length = accepted_length(model, head, held_out)
    log(f"accepted {length[0]:.2f} of {UNROLL}: {length[1]}", started)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    save(head, options.out, head_card(num_parameters, num_tokens, times, length, options))
    log(f"saved to {options.out}", started)


if __name__ == "__main__":
    main()
