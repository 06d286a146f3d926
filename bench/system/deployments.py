"""Deployments of one model on two cores: split, or two workers that do both. Used by experiments on whole systems.

All systems of an experiment run for its whole length, so its arms can take turns; an idle system only sends heartbeats.
`baton up` gives the n-th worker of a system the n-th core and one compute thread. So prefill has core 0 and decode core
1, and two workers that do both have the same two cores.
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

from baton.services.cli.bench.workload.prompts import Vocabulary
from bench.harness.model_shapes import SHAPES
from bench.harness.running_system import running_system
from bench.system.load_client import LoadClient

SPLIT, MIXED, UNCHUNKED = "split", "mixed chunks", "unchunked"
WAIT_S = 600.0
"""Bound on one answer; at the highest rates a queue builds up."""

UNLIMITED_BUDGET = 1 << 20
"""A token budget above every prompt: every prompt is one chunk."""

KV_MEMORY_MIB = 256
"""Of a worker. Up to ten of them run side by side, and 16,000 tokens of the shape `m32` fit."""

SPLIT_FLAGS = ("--prefill", "1", "--decode", "1")
OWN_CORES = "--no-lend-cores"
"""Of `baton up`: an idle worker's core is not lent, so each worker has one thread at any time."""


def colocated_flags(token_budget: int) -> tuple[str, ...]:
    """Flags of `baton up` for two workers that do both, with `token_budget` tokens a step for rows and prompts."""
    return ("--prefill", "0", "--decode", "2", "--decode-token-budget", str(token_budget))


@contextlib.contextmanager
def running_clients(
    systems: Mapping[str, tuple[str, ...]], shape: str, dtype: str, seed: int, console: Console
) -> Iterator[tuple[asyncio.Runner, dict[str, LoadClient]]]:
    """Runs the systems and yields an event loop and a client of each. `systems`: flags of `baton up`.

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
    """Runs systems of one random model of `shape` and yields their URLs. Raises as `running_system` does."""
    # Imported here: the tested parts of the experiments need no torch.
    from bench.harness.random_models import save_random_model

    common = ("--dtype", dtype, "--kv-memory-mib", str(KV_MEMORY_MIB))
    with TemporaryDirectory(prefix="baton-bench-") as directory, contextlib.ExitStack() as stack:
        model = str(save_random_model(SHAPES[shape], Path(directory) / shape, seed=seed))
        yield {
            name: stack.enter_context(running_system(model, None, seed, (*flags, *common), console)).url
            for name, flags in systems.items()
        }
