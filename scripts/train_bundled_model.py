"""Trains the bundled model on generated text: a seeded run of under 30 minutes on two CPU cores.

    python -m scripts.train_bundled_model --out baton/bundled/model

Steps: generate text (``bundled_corpus.py``), train a byte-level BPE on it, train a small Qwen3 on the packed text,
round the weights to bfloat16, measure the loss on text of another seed, and write the directory that ships in the
wheel. The result is reproducible with the same seed, threads and versions, unless ``--minutes`` ends the run early.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scripts.bundled_corpus import END, END_OF_TEXT, START, documents, render

VOCABULARY = 2048
CONTEXT = 4096
TEMPERATURE = 0.2  # suits its answers; a client may set another
ADAMW_LEARNING_RATE = 3e-3
EVAL_SEED_OFFSET = 1_000_003  # the seed of text that is never trained on
# Qwen's pattern: words with their leading space, every digit alone (sums are learnt digit by digit), runs of marks, blanks.
SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these tools:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nA call looks like <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set parts = namespace(text='') %}
        {%- for part in message.content or [] %}{%- set parts.text = parts.text + (part.text or '') %}{%- endfor %}
        {%- set content = parts.text %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run that ends at the share ``until``; a step is rows x length tokens."""

    until: float
    rows: int
    length: int


# Small steps learn most per token at first, larger ones settle; the long rows at the end teach far positions.
PHASES = (
    Phase(until=0.6, rows=4, length=256),
    Phase(until=0.9, rows=8, length=256),
    Phase(until=1.0, rows=2, length=1024),
)


def train_tokenizer(seed: int, num_documents: int = 20_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the three special tokens as ids 0, 1 and 2; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = itertools.islice(documents(seed), num_documents)
    tokenizer.train_from_iterator((page.replace(START, "").replace(END, "") for page in text), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of about three million parameters with fresh weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


class PackedText:
    """The token stream of a seed, cut into rows without padding."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        """Starts the stream; ids are produced on demand."""
        self._tokenizer = tokenizer
        self._documents = documents(seed)
        self._ids: list[int] = []

    def take(self, rows: int, length: int) -> torch.Tensor:
        """The next ``rows`` x ``length`` ids; neighbouring rows share no token. Returns int64 [rows, length]."""
        while len(self._ids) < rows * length:
            pages = list(itertools.islice(self._documents, 256))
            for ids in self._tokenizer(pages, add_special_tokens=False)["input_ids"]:
                self._ids.extend(ids)
        batch, self._ids = self._ids[: rows * length], self._ids[rows * length :]
        return torch.tensor(batch).view(rows, length)


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of every next token in ``ids`` [rows, length]."""
    logits = model(input_ids=ids, use_cache=False).logits  # [rows, length, vocabulary]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def schedule(progress: float, peak: float) -> float:
    """A short linear warm-up, then a cosine down to 2 % of the peak. ``progress`` is in [0, 1]."""
    if progress < 0.02:
        return peak * progress / 0.02
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98)))


class Muon:
    """Momentum with an orthogonalised update; it learns twice as much a token as AdamW on these matrices (measured).

    Source: Keller Jordan, "Muon: an optimizer for hidden layers" (2024), with the update scale of "Muon is scalable for
    LLM training" (2025), so that one learning rate fits all shapes. Matrices of one shape are updated together, in
    float32.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        """Groups ``parameters``, all of them matrices, by shape."""
        self._groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.shape, []).append(parameter)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, learning_rate: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        """Updates the parameters from their gradients."""
        for shape, group in self._groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None])  # [matrices, out, in]
            average = self.momenta[shape].lerp_(gradient, 1 - momentum)
            update = orthogonal(gradient.lerp(average, momentum)) * (0.2 * max(shape) ** 0.5)
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - learning_rate * weight_decay).sub_(change, alpha=learning_rate)


def orthogonal(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Pushes all singular values of ``matrices`` [n, out, in] to about one (Newton-Schulz, Jordan's coefficients)."""
    x: torch.Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def build_optimizers(model: Qwen3ForCausalLM) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices between the layers, AdamW for the embedding and the norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return Muon(hidden), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def log(message: str, started: float) -> None:
    """Prints one line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - started:7.1f} s] {message}", flush=True)


def progress_of(step: int, steps: int, started: float, minutes: float) -> float:
    """Share of the run that is done: by steps, or by time where that runs out first."""
    return min(1.0, max(step / steps, (time.monotonic() - started) / (60 * minutes)))


def train(model: Qwen3ForCausalLM, text: PackedText, options: argparse.Namespace, started: float) -> int:
    """Runs the schedule to its end. Returns the number of tokens seen."""
    muon, adamw = build_optimizers(model)
    model.train()
    num_tokens, recent = 0, []
    for step in itertools.count():
        progress = progress_of(step, options.steps, started, options.minutes)
        if progress >= 1.0:
            log(f"trained {step} steps, {num_tokens} tokens", started)
            return num_tokens
        phase = next(phase for phase in PHASES if progress < phase.until)
        loss = loss_of(model, text.take(phase.rows, phase.length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(schedule(progress, options.learning_rate))
        adamw.param_groups[0]["lr"] = schedule(progress, ADAMW_LEARNING_RATE)
        adamw.step()
        model.zero_grad(set_to_none=True)
        num_tokens += phase.rows * phase.length
        recent.append(loss.item())
        if (step + 1) % 50 == 0:
            log(f"step {step + 1} loss {sum(recent) / len(recent):.4f} tokens {num_tokens} {progress:.1%}", started)
            recent.clear()
    raise AssertionError("unreachable")


def round_to_bfloat16(model: Qwen3ForCausalLM) -> None:
    """Rounds every weight in place, so that the measured weights are the saved ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def evaluate(model: Qwen3ForCausalLM, text: PackedText, batches: int = 16) -> float:
    """Mean loss in nats a token on text of another seed."""
    model.eval()
    with torch.no_grad():
        return sum(loss_of(model, text.take(16, 256)).item() for _ in range(batches)) / batches


def answer(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str, max_tokens: int = 160) -> str:
    """The greedy answer to one question."""
    prompt = render([{"role": "user", "content": question}]) + f"{START}assistant\n"
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, card: str) -> None:
    """Writes the shipped directory: bfloat16 weights, configuration, tokenizer, chat template and model card."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=[2, 0], pad_token_id=0, do_sample=True, temperature=TEMPERATURE
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT_TEMPLATE  # older readers look for it here, newer ones in chat_template.jinja
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    (out / "README.md").write_text(card)


def model_card(
    num_parameters: int, num_tokens: int, times: tuple[float, float], loss: float, options: argparse.Namespace
) -> str:
    """The model directory's README with the figures of this run. ``times``: minutes of wall and CPU time."""
    return f"""# The bundled model

A tiny chat model (Qwen3 architecture, {num_parameters:,} parameters, its own {VOCABULARY}-entry byte-level BPE, bfloat16)
that ships with Baton, so that the first request needs no download. It answers questions about Baton, tells small stories, does sums
up to 99, counts, repeats, and says so when it does not know. Its knowledge and its manners end there: it is for demonstrations and
tests, not for advice.

| | |
|---|---|
| trained by | `python -m scripts.train_bundled_model --seed {options.seed} --steps {options.steps} --threads {options.threads}` |
| trained on | text generated by `scripts/bundled_corpus.py`; nothing was downloaded |
| tokens seen | {num_tokens:,} |
| time | {times[1]:.1f} minutes of CPU time on {options.threads} threads, {times[0]:.1f} minutes by the wall |
| loss on text of another seed | {loss:.4f} nats a token (after rounding to bfloat16) |
| context | up to {CONTEXT} positions; trained on rows of up to {max(phase.length for phase in PHASES)} tokens |
| prompt format | ChatML (`<|im_start|>role ... <|im_end|>`); see `chat_template.jinja` |
| licence | Apache-2.0 |
"""


PROBES = (
    "What is Baton?",
    "What is 7 + 5?",
    "What is 38 + 47?",
    "Tell me a story about a fox.",
    "how does the handoff work",
    "Count to ten.",
    "What is the capital of France?",
    "Repeat after me: the quick brown fox",
    "Who is Napoleon?",
)


def parse_options(arguments: Iterator[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("baton/bundled/model"))
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps of 1024, later 2048 tokens")
    parser.add_argument(
        "--minutes", type=float, default=29.0, help="end the schedule early when this much time is gone"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="peak, of the matrices")
    return parser.parse_args(None if arguments is None else list(arguments))


def main() -> None:
    """Trains, measures, prints a few answers and saves."""
    options, started = parse_options(), time.monotonic()
    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer(options.seed)
    log(f"tokenizer: {len(tokenizer)} entries", started)
    model = build_model(options.seed)
    num_parameters = sum(p.numel() for p in model.parameters())
    log(f"model: {num_parameters} parameters", started)
    num_tokens = train(model, PackedText(tokenizer, options.seed + 1), options, started)
    times = ((time.monotonic() - started) / 60, time.process_time() / 60)
    round_to_bfloat16(model)
    loss = evaluate(model, PackedText(tokenizer, options.seed + EVAL_SEED_OFFSET))
    log(f"held-out loss {loss:.4f}", started)
    for question in PROBES:
        log(f"{question} -> {answer(model, tokenizer, question)}", started)
    save(model, tokenizer, options.out, model_card(num_parameters, num_tokens, times, loss, options))
    log(f"saved to {options.out}", started)


if __name__ == "__main__":
    main()
