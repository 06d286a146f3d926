"""Error of pages of int8 against those of float32: logits, and greedy choices.

    python -m bench.attention.int8_pages [--sequences 16] [--random-model DIRECTORY]

The bundled model on unseen text (`scripts/bundled_corpus.py` with another seed) and, if given, another model on random
tokens. Every sequence goes through the worker's own decoder in one chunk, over pages of either kind. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.bundled import MODEL_DIR
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from bench.engine.quantization import bundled_texts, logits_of, loss_of, random_texts


@dataclass(frozen=True, slots=True)
class PageError:
    """Means over tokens, and bytes of a token in pages. `gap`: the median token's root mean square difference of
    logits, in their standard deviations."""

    gap: float
    divergence: float
    agreement: float
    perplexity_change: float
    bytes_a_token: tuple[float, float]


def page_error(directory: Path, texts: Sequence[Sequence[int]]) -> PageError:
    """The error of one model. Raises `UnsupportedModel` for one without pages of int8."""
    model = load_model(directory, dtype=DtypeChoice.FLOAT32)
    int8 = model.with_int8_pages()
    with torch.inference_mode():
        exact, rounded = logits_of(model, texts), logits_of(int8, texts)
    loss = loss_of(exact, rounded, texts)
    gaps = torch.cat([(b - a).square().mean(-1).sqrt() / a.std(-1) for a, b in zip(exact, rounded, strict=True)])
    num_bytes = [one.geometry.page_bytes / one.geometry.page_size for one in (model, int8)]
    return PageError(
        gaps.median().item(), loss.divergence, loss.agreement, loss.perplexity_change, (num_bytes[0], num_bytes[1])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Error of pages of int8.")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--random-model", type=Path)
    options = parser.parse_args()
    table = Table("model", "logits (std)", "mean KL (nats)", "same top-1", "perplexity", "bytes a token")
    cases = {"bundled": (MODEL_DIR, bundled_texts(options.sequences))}
    if options.random_model is not None:
        vocab_size = load_model(options.random_model).config.vocab_size
        cases["random"] = (options.random_model, random_texts(vocab_size, options.sequences, 0))
    for name, (directory, texts) in cases.items():
        error = page_error(directory, texts)
        figures = (f"{error.gap:.2e}", f"{error.divergence:.2e}", f"{error.agreement:.4f}")
        sizes = " -> ".join(f"{size:.0f}" for size in error.bytes_a_token)
        table.add_row(name, *figures, f"{error.perplexity_change:+.3%}", sizes)
    Console().print(table)


if __name__ == "__main__":
    main()
