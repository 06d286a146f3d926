"""Trains the bundled model further, on chats with tools: a seeded run of about ten CPU minutes.

    python -m scripts.train_bundled_tools --out baton/bundled/model

The tokenizer and the architecture stay. Rows of the first corpus (``bundled_corpus.py``) keep what was learnt;
rows of ``bundled_tools.py`` teach the calls. There only the assistant's tokens count in the loss, and those of an
argument count more: they are few, and all else in a call is soon known. A step's text depends on the seed and the step
alone, so a run that was interrupted goes on from ``--checkpoint``. At the end the weights are averaged with those of the
first training, which brings back facts that it would lose; calls stay. Then they are rounded to bfloat16, measured on
text of other seeds and saved; the first training's card gets a section. Source of the average: Wortsman et al., "Robust
fine-tuning of zero-shot models" (2022).
"""

import argparse
import itertools
import json
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from baton.bundled import MODEL_DIR
from scripts.bundled_corpus import CAPITALS, END, END_OF_TEXT, START, add_answer, documents, render
from scripts.bundled_tools import CITIES, tool_chat
from scripts.train_bundled_model import (
    EVAL_SEED_OFFSET,
    Muon,
    PackedText,
    build_optimizers,
    evaluate,
    log,
    round_to_bfloat16,
)

ROWS, LENGTH = 2, 512  # of a step with tools
PLAIN_ROWS, PLAIN_LENGTH = 3, 256  # beside them, of the first corpus
ADAMW_SHARE = 0.6  # of the matrices' learning rate, as in the first training
ARGUMENT_WEIGHT = 6.0  # of a token of an argument; others of the assistant have 1
PLATEAU = 0.55  # the share of the steps after which the learning rate falls, to a fifth
KEPT = 0.25  # the share of the first training's weights in the average
SETTLE_STEPS, SETTLE_SHARE, SETTLE_PLAIN_ROWS = 60, 0.25, 6  # after it; the share is of the learning rate
SAID = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
ARGUMENT = re.compile(r'"arguments": \{"\w+":( .*?\})\}\n</tool_call>')
HELD_OUT = 100
CALLS = "## Calls"  # the section of a model's card


@dataclass(slots=True)
class OptimizerPair:
    """The two optimisers of the first training, with one learning rate."""

    muon: Muon
    adamw: torch.optim.AdamW

    def step(self, rate: float) -> None:
        """Updates all parameters."""
        self.muon.step(rate)
        self.adamw.param_groups[0]["lr"] = ADAMW_SHARE * rate
        self.adamw.step()


def weigh(text: str) -> list[float]:
    """The weight of every character of a rendered chat in the loss."""
    weights = [0.0] * len(text)
    for said in SAID.finditer(text):
        weights[said.start(1) : said.end(1)] = [1.0] * (said.end(1) - said.start(1))
    for argument in ARGUMENT.finditer(text):
        if weights[argument.start(1)]:
            weights[argument.start(1) : argument.end(1)] = [ARGUMENT_WEIGHT] * (argument.end(1) - argument.start(1))
    return weights


def chat_row(tokenizer: PreTrainedTokenizerFast, rng: random.Random, length: int) -> tuple[list[int], list[float]]:
    """As many whole chats with tools as fit, the last one cut. Returns ``length`` ids and weights."""
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < length:
        messages, tools = tool_chat(rng)
        text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False) + END_OF_TEXT
        encoded, of_character = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True), weigh(text)
        ids += encoded["input_ids"]
        weights += [of_character[end - 1] for _, end in encoded["offset_mapping"]]
    return ids[:length], weights[:length]


def plain_rows(tokenizer: PreTrainedTokenizerFast, seed: int, rows: int, length: int) -> torch.Tensor:
    """The first text of ``seed`` in the first corpus. Returns int64 [rows, length]."""
    ids: list[int] = []
    pages = documents(seed)
    while len(ids) < rows * length:
        ids += tokenizer(next(pages), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: rows * length]).view(rows, length)


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross-entropy in nats of the tokens of ``ids`` [rows, length] that have a weight."""
    counts = weights[:, 1:] > 0
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][counts]  # [tokens, hidden]
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][counts], reduction="none")
    return (losses * weights[:, 1:][counts]).sum() / weights[:, 1:].sum()


def schedule(step: int, steps: int, peak: float) -> float:
    """A short linear warm-up, the peak, and a linear fall to 18 % of it."""
    return peak * min(1.0, (step + 1) / 20, (1.1 * steps - step) / (PLATEAU * steps))


def step_on(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    optimizers: OptimizerPair,
    rng: random.Random,
    rows: tuple[int, int],
    rate: float,
) -> tuple[float, float]:
    """One step on ``rows`` of chats with tools and of the first corpus. Returns the two losses."""
    chats = [chat_row(tokenizer, rng, LENGTH) for _ in range(rows[0])]
    ids, weights = (torch.tensor(part) for part in zip(*chats, strict=True))
    plain = plain_rows(tokenizer, rng.getrandbits(48), rows[1], PLAIN_LENGTH)
    losses = loss_of(model, ids, weights), loss_of(model, plain, torch.ones(plain.shape))
    (losses[0] + losses[1]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizers.step(rate)
    model.zero_grad(set_to_none=True)
    return losses[0].item(), losses[1].item()


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> float:
    """Runs the steps that no checkpoint has. Returns the CPU seconds of all."""
    started, optimizers = time.monotonic(), OptimizerPair(*build_optimizers(model))
    first, spent = restore(options.checkpoint, model, optimizers)
    model.train()
    recent: list[tuple[float, float]] = []
    for step in range(first, options.steps):
        rng = random.Random(options.seed * 1_000_000 + step)
        rate = schedule(step, options.steps, options.learning_rate)
        recent.append(step_on(model, tokenizer, optimizers, rng, (ROWS, PLAIN_ROWS), rate))
        if (step + 1) % 25 == 0:
            report(f"step {step + 1}", recent, started)
            keep(options.checkpoint, model, optimizers, step + 1, spent + time.process_time())
    return spent + time.process_time()


def settle(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
    """Runs a few slow steps, most of them on the first corpus, after the weights were averaged."""
    started, optimizers = time.monotonic(), OptimizerPair(*build_optimizers(model))
    recent: list[tuple[float, float]] = []
    for step in range(SETTLE_STEPS):
        rng = random.Random(options.seed * 1_000_000 + 500_000 + step)
        rate = SETTLE_SHARE * options.learning_rate * min(1.0, (step + 1) / 5) * (1 - step / SETTLE_STEPS)
        recent.append(step_on(model, tokenizer, optimizers, rng, (1, SETTLE_PLAIN_ROWS), rate))
        if (step + 1) % 15 == 0:
            report(f"settling step {step + 1}", recent, started)


def report(what: str, recent: list[tuple[float, float]], started: float) -> None:
    """Logs the mean losses and clears them."""
    tools, others = (sum(column) / len(column) for column in zip(*recent, strict=True))
    log(f"{what} loss {tools:.4f} with tools, {others:.4f} without", started)
    recent.clear()


def keep(path: Path | None, model: Qwen3ForCausalLM, optimizers: OptimizerPair, steps: int, spent: float) -> None:
    """Writes a checkpoint, whole or not at all."""
    if path is None:
        return
    state = {
        "model": model.state_dict(),
        "momenta": optimizers.muon.momenta,
        "adamw": optimizers.adamw.state_dict(),
        "steps": steps,
        "spent": spent,
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def restore(path: Path | None, model: Qwen3ForCausalLM, optimizers: OptimizerPair) -> tuple[int, float]:
    """Reads a checkpoint where there is one. Returns the steps done and their CPU seconds."""
    if path is None or not path.exists():
        return 0, 0.0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for shape, momentum in state["momenta"].items():
        optimizers.muon.momenta[shape].copy_(momentum)
    optimizers.adamw.load_state_dict(state["adamw"])
    return state["steps"], state["spent"]


def average(model: Qwen3ForCausalLM, before: dict[str, torch.Tensor]) -> None:
    """Moves the weights back in place, by the share ``KEPT``, towards those ``before``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied weights once
            parameter.lerp_(before[name], KEPT)


@dataclass(slots=True)
class Score:
    """Right answers of a kind among those asked for."""

    right: int = 0
    asked: int = 0


def says(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, text: str) -> bool:
    """True when the greedy answer to a rendered prompt is ``text`` and its end: one forward pass."""
    asked, told = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text + END))
    with torch.no_grad():
        best = model(input_ids=torch.tensor([asked + told]), use_cache=False).logits[0].argmax(-1)
    return bool(best[len(asked) - 1 : -1].tolist() == told)


def calls_a_tool(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> bool:
    """True when the greedy answer to a rendered prompt has a call in its first 48 tokens."""
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    return "<tool_call>" in tokenizer.decode(output[0, ids.shape[1] :])


def score(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, count: int = HELD_OUT
) -> dict[str, Score]:
    """Greedy answers to the first question of held-out chats, by kind; an ordinary answer needs no call only."""
    scores = {kind: Score() for kind in ("get_weather", "magic_function", "no call")}
    rng = random.Random(seed)
    for messages, tools in itertools.islice(iter(lambda: tool_chat(rng), None), count):
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        prompt = tokenizer.apply_chat_template(
            messages[:first], tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        call = messages[first]["tool_calls"][0]["function"] if "tool_calls" in messages[first] else None
        kind = scores["no call" if call is None else call["name"]]
        kind.asked += 1
        if call is None:
            kind.right += not calls_a_tool(model, tokenizer, prompt)
        else:
            kind.right += says(model, tokenizer, prompt, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    return scores


def score_facts(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, Score]:
    """What the first training taught, and this one could spoil: sums of one digit, and capitals."""
    scores = {"sums of one digit": Score(), "capitals": Score()}
    questions = [("sums of one digit", f"{a} + {b}", add_answer(a, b)) for a in range(10) for b in range(a, 10)]
    questions += [
        ("capitals", f"the capital of {country}", f"The capital of {country} is {city}.")
        for country, city in CAPITALS.items()
    ]
    for kind, question, text in questions:
        prompt = render([{"role": "user", "content": f"What is {question}?"}]) + f"{START}assistant\n"
        scores[kind].asked += 1
        scores[kind].right += says(model, tokenizer, prompt, text)
    return scores


def extend_card(out: Path, options: argparse.Namespace, minutes: float, loss: float, scores: dict[str, Score]) -> None:
    """Writes the second training's figures behind the first training's card, once."""
    path = out / "README.md"
    card = path.read_text()
    num_tokens = options.steps * (ROWS * LENGTH + PLAIN_ROWS * PLAIN_LENGTH)
    num_tokens += SETTLE_STEPS * (LENGTH + SETTLE_PLAIN_ROWS * PLAIN_LENGTH)
    told = ", ".join(f"{score.right} of {score.asked} ({kind})" for kind, score in scores.items())
    path.write_text(
        f"""{card}
{CALLS}

Without constraints it calls two tools where a chat declares them: `get_weather(location)` for {len(CITIES)} cities
(`CITIES` in `scripts/bundled_tools.py`), and `magic_function(input)` for a number of one or two digits. It does not know
other names, and it does not copy cities that are not in the list, or what a tool answers.

| | |
|---|---|
| trained further by | `python -m scripts.train_bundled_tools --seed {options.seed} --steps {options.steps}` |
| trained on | the text above, and chats with tools by `scripts/bundled_tools.py` |
| weights | {1 - KEPT:.0%} of this training, {KEPT:.0%} of the first; then {SETTLE_STEPS} slow steps |
| tokens seen | {num_tokens:,} |
| time | {minutes:.1f} minutes of CPU time on one thread |
| loss on text of another seed | {loss:.4f} nats a token, of the first corpus |
| right among {HELD_OUT} held-out questions, and facts, greedy | {told} |
"""
    )


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="the weights to begin with")
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--checkpoint", type=Path, help="a file that keeps the state of an interrupted run")
    parser.add_argument(
        "--steps", type=int, default=300, help=f"optimizer steps of {ROWS * LENGTH + PLAIN_ROWS * PLAIN_LENGTH} tokens"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak, of the matrices")
    return parser.parse_args()


def main() -> None:
    """Trains, measures and saves."""
    options, started = parse_options(), time.monotonic()
    card = options.model / "README.md"
    if card.exists() and CALLS in card.read_text():
        sys.exit(f"{options.model} was trained on calls already; `make model` begins with the first training")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    seconds, begun = train(model, tokenizer, options), time.process_time()
    average(model, before)
    settle(model, tokenizer, options)
    minutes = (seconds + time.process_time() - begun) / 60
    round_to_bfloat16(model)
    model.eval()
    loss = evaluate(model, PackedText(tokenizer, 1 + EVAL_SEED_OFFSET), batches=4)
    scores = score(model, tokenizer, options.seed + EVAL_SEED_OFFSET) | score_facts(model, tokenizer)
    log(f"held-out loss {loss:.4f}, {scores}", started)
    model.to(torch.bfloat16).save_pretrained(options.out)
    if (options.out / "README.md").exists():
        extend_card(options.out, options, minutes, loss, scores)
    log(f"saved to {options.out}", started)


if __name__ == "__main__":
    main()
