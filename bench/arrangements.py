"""The ways to spend two cores on one model: split, or two workers that do both. Called by `interference`, `goodput`.

All of an experiment's systems run side by side for its whole length, so that its arms can take turns; one that is not
asked only sends heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console

from bench.load_client import LoadClient
from bench.running_system import running_system
from bench.shapes import SHAPES
from services.cli.bench.prompts import Vocabulary

SPLIT, MIXED, UNCHUNKED = "split", "mixed chunks", "unchunked"
WAIT_S = 600.0
"""For one answer: at the highest rates a queue builds up."""

WHOLE_PROMPT = 1 << 20
"""A token budget that no prompt reaches: every prompt is one chunk."""


def flags_of(arrangement: str, chunk_tokens: int) -> tuple[str, ...]:
    """For `baton up`. Every arrangement has two workers of one thread, on the same two cores."""
    if arrangement == SPLIT:
        return ("--prefill", "1", "--decode", "1")
    budget = chunk_tokens if arrangement == MIXED else WHOLE_PROMPT
    return ("--prefill", "0", "--decode", "2", "--decode-token-budget", str(budget))


@contextlib.contextmanager
def running_clients(
    shape: str, dtype: str, seed: int, chunk_tokens: int, console: Console
) -> Iterator[tuple[asyncio.Runner, dict[str, LoadClient]]]:
    """A client of each, and the loop that they live in. Raises as `running_system` does."""
    vocabulary = Vocabulary(SHAPES[shape].vocab_size, seed)
    with (
        running_arrangements(shape, seed, chunk_tokens, ("--dtype", dtype), console) as urls,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        contextlib.ExitStack() as stack,
    ):
        clients = {
            name: LoadClient(url, vocabulary, timeout_s=WAIT_S, clock=time.perf_counter) for name, url in urls.items()
        }
        for client in clients.values():
            stack.callback(_close, runner, client)
        yield runner, clients


def _close(runner: asyncio.Runner, client: LoadClient) -> None:
    runner.run(client.close())


@contextlib.contextmanager
def running_arrangements(
    shape: str, seed: int, chunk_tokens: int, flags: tuple[str, ...], console: Console
) -> Iterator[dict[str, str]]:
    """The URL of each, all of one random model of `shape`. Raises as `running_system` does."""
    # Imported here: the parts of the experiments that are tested need no torch.
    from bench.random_models import save_random_model

    with TemporaryDirectory(prefix="baton-bench-") as directory, contextlib.ExitStack() as stack:
        model = str(save_random_model(SHAPES[shape], Path(directory) / shape, seed=seed))
        yield {
            name: stack.enter_context(
                running_system(model, None, seed, (*flags_of(name, chunk_tokens), *flags), console)
            )
            for name in (SPLIT, MIXED, UNCHUNKED)
        }
