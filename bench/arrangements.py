"""The ways to spend two cores on one model: split, or two workers that do both. Called by `interference`, `goodput`.

All of an experiment's systems run side by side for its whole length, so that its arms can take turns; one that is not
asked only sends heartbeats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from bench.running_system import running_system

SPLIT, MIXED, UNCHUNKED = "split", "mixed chunks", "unchunked"
WHOLE_PROMPT = 1 << 20
"""A token budget that no prompt reaches: every prompt is one chunk."""


def flags_of(arrangement: str, chunk_tokens: int) -> tuple[str, ...]:
    """For `baton up`. Every arrangement has two workers of one thread, on the same two cores."""
    if arrangement == SPLIT:
        return ("--prefill", "1", "--decode", "1")
    budget = chunk_tokens if arrangement == MIXED else WHOLE_PROMPT
    return ("--prefill", "0", "--decode", "2", "--decode-token-budget", str(budget))


@contextlib.contextmanager
def running_arrangements(
    shape: str, seed: int, chunk_tokens: int, flags: tuple[str, ...], console: Console
) -> Iterator[dict[str, str]]:
    """The URL of each, all of one random model of `shape`. Raises as `running_system` does."""
    # Imported here: the parts of the experiments that are tested need no torch.
    from bench.random_models import save_random_model
    from bench.shapes import SHAPES

    with TemporaryDirectory(prefix="baton-bench-") as directory, contextlib.ExitStack() as stack:
        model = str(save_random_model(SHAPES[shape], Path(directory) / shape, seed=seed))
        yield {
            name: stack.enter_context(
                running_system(model, None, seed, (*flags_of(name, chunk_tokens), *flags), console)
            )
            for name in (SPLIT, MIXED, UNCHUNKED)
        }
