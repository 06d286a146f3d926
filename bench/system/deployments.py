"""The ways to spend two cores on one model: split, or two workers that do both. Called by experiments on whole systems.

All of an experiment's systems run side by side for its whole length, so that its arms can take turns; one that is not
asked only sends heartbeats. `baton up` gives the n-th worker of a system the n-th core and one compute thread: prefill
has core 0 and decode core 1, and of two workers that do both each has one of the same two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console

from bench.harness.model_shapes import SHAPES
from bench.harness.running_system import running_system
from bench.system.load_client import LoadClient
from services.cli.bench.workload.prompts import Vocabulary

SPLIT, MIXED, UNCHUNKED = "split", "mixed chunks", "unchunked"
WAIT_S = 600.0
"""For one answer: at the highest rates a queue builds up."""

UNLIMITED_BUDGET = 1 << 20
"""A token budget that no prompt reaches: every prompt is one chunk."""

KV_MEMORY_MIB = 256
"""Of a worker. Up to ten of them run side by side, and 16,000 tokens of the shape `m32` fit."""

SPLIT_FLAGS = ("--prefill", "1", "--decode", "1")


def colocated_flags(token_budget: int) -> tuple[str, ...]:
    """For `baton up`: two workers that do both, with so many tokens a step, rows and prompts together."""
    return ("--prefill", "0", "--decode", "2", "--decode-token-budget", str(token_budget))


@contextlib.contextmanager
def running_clients(
    systems: Mapping[str, tuple[str, ...]], shape: str, dtype: str, seed: int, console: Console
) -> Iterator[tuple[asyncio.Runner, dict[str, LoadClient]]]:
    """A client of each system, and the loop that they live in. `systems`: flags of `baton up`.

    Raises as `running_system` does.
    """
    vocabulary = Vocabulary(SHAPES[shape].vocab_size, seed)
    with (
        running_deployments(systems, shape, dtype, seed, console) as urls,
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
def running_deployments(
    systems: Mapping[str, tuple[str, ...]], shape: str, dtype: str, seed: int, console: Console
) -> Iterator[dict[str, str]]:
    """The URL of each, all of one random model of `shape`. Raises as `running_system` does."""
    # Imported here: the parts of the experiments that are tested need no torch.
    from bench.harness.random_models import save_random_model

    common = ("--dtype", dtype, "--kv-memory-mib", str(KV_MEMORY_MIB))
    with TemporaryDirectory(prefix="baton-bench-") as directory, contextlib.ExitStack() as stack:
        model = str(save_random_model(SHAPES[shape], Path(directory) / shape, seed=seed))
        yield {
            name: stack.enter_context(running_system(model, None, seed, (*flags, *common), console)).url
            for name, flags in systems.items()
        }
