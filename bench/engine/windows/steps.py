"""CPU time of decode steps and of prompts with window slots and without them, in turns.

    python -m bench.engine.windows.steps [--rows 1 16] [--context 4096] [--rotations 15] [--steps 8] [--seed 0]

A model of Gemma 3's 270M shape with a small vocabulary and random weights in bfloat16 (18 layers, 15 with a window of
512) is loaded once. Two pairs of engines over it, one without slots and one with those of `auto`, have pools of equal
bytes. A step is one turn of both loops, with scheduler, digests and page checks, while all rows decode. A prompt is all
turns from its arrival to its first token, with its copy to decode's pool. Times are the thread's CPU time with one
compute thread; a block is the median of its steps, a figure the median of the ratios of neighbouring blocks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from baton.domain.request import SamplingParams, StopParams
from baton.kv.geometry import PageWindow
from baton.kv.windows.plan import auto_share, plan_pool
from baton.model.cpu import configure_threads
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.services.local.pair import LocalPair, PairLimits

PAGE_SIZE, TOKEN_BUDGET, VOCABULARY, MAX_TOKENS = 16, 512, 4096, 2048
GREEDY = SamplingParams(temperature=0.0)


def save_model(directory: Path, seed: int) -> Path:
    """Writes the model."""
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, max_position_embeddings=32768,
        query_pre_attn_scalar=256, pad_token_id=0, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def make_pairs(model: LoadedModel, num_pages: int, max_rows: int) -> dict[str, LocalPair]:
    """Pairs by `--window-slots`. Pools have the bytes of `num_pages` whole pages, and room for all rows."""
    window = PageWindow.of(model.geometry)
    if window is None:
        raise ValueError("the model has no window part")
    share, num_bytes = auto_share(window, model.config.max_model_len), num_pages * model.geometry.page_bytes
    least = max(max_rows * window.most_pages(2), 2 * window.most_pages(TOKEN_BUDGET))
    plan = plan_pool(model.geometry, share, least, num_bytes=num_bytes)
    if plan.num_slots is None:
        raise ValueError("the pool is too small for window slots")
    sizes = {"off": (num_pages, None), "auto": (plan.num_pages, plan.num_slots)}
    return {
        name: LocalPair(model, PairLimits(pages, max_rows, TOKEN_BUDGET, slots))
        for name, (pages, slots) in sizes.items()
    }


def serve_prompt(pair: LocalPair, rng: random.Random, num_tokens: int) -> float:
    """Seconds of CPU time until a new prompt has its first token. The row goes on."""
    prompt = tuple(rng.choices(range(1, VOCABULARY), k=num_tokens))
    began = time.thread_time()
    id = pair.submit(prompt, GREEDY, StopParams(MAX_TOKENS))
    if id is None:
        raise RuntimeError("the pool has no room for the prompt")
    while all(part.id != id for part in pair.step()):
        pass
    return time.thread_time() - began


def time_steps(pair: LocalPair, num_steps: int) -> float:
    """Median seconds of CPU time of a step."""
    times = []
    for _ in range(num_steps):
        began = time.thread_time()
        for _ in pair.step():
            pass
        times.append(time.thread_time() - began)
    return statistics.median(times)


def compare(
    pairs: dict[str, LocalPair], measure: Callable[[LocalPair], float], rotations: int, rng: random.Random
) -> str:
    """Cells of the table: milliseconds without and with slots, and the ratio with its quartiles."""
    found: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(rotations):
        for name in rng.sample(sorted(pairs), len(pairs)):
            found[name].append(measure(pairs[name]))
    ratios = [after / before for before, after in zip(found["off"], found["auto"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = [f"{1e3 * statistics.median(times):.2f}" for times in (found["off"], found["auto"])]
    return f"{' | '.join(medians)} | {middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rotations", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    configure_threads(1)
    rng, num_rows = random.Random(options.seed), max(options.rows, default=1)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        model = load_model(save_model(Path(directory), options.seed), dtype=DtypeChoice.BFLOAT16, page_size=PAGE_SIZE)
    num_pages = 2 * (num_rows + 1) * options.context // PAGE_SIZE
    print("| part | off, ms | auto, ms | ratio (quartiles) |\n|---|---|---|---|")
    for rows in sorted(options.rows):
        pairs = make_pairs(model, num_pages, num_rows + 1)
        for name in pairs:
            for number in range(rows):
                serve_prompt(pairs[name], random.Random(number), options.context)
        cells = compare(pairs, lambda pair: time_steps(pair, options.steps), options.rotations, rng)
        print(f"| step of {rows} rows at {options.context:,} tokens | {cells} |", flush=True)
    pairs = make_pairs(model, num_pages, num_rows + 1)

    def prompt_s(pair: LocalPair) -> float:
        seconds = serve_prompt(pair, rng, options.context)
        pair.abort()
        return seconds

    cells = compare(pairs, prompt_s, options.rotations, rng)
    print(f"| prompt of {options.context:,} tokens, handed over | {cells} |", flush=True)


if __name__ == "__main__":
    main()
