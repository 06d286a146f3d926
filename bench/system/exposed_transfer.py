"""G5: transfer time that no compute hides, over TTFT.

    python -m bench.system.exposed_transfer [--shape m150] [--transports nixl stream] [--prompt-tokens 512 2048]
        [--requests 1] [--rotations 10] [--seed 0] [--result FILE]

Each transport has a system of one prefill and one decode worker; all run the same random model for the whole run. A
block sends `--requests` prompts of one length to one system, one at a time. Exposed time is the growth of
`baton_transfer_exposed_seconds`: from the end of a prompt's compute to the commit of its pages, summed over the block's
requests. The figure divides it by the sum of their TTFT at the client. The first token does not wait for the transfer;
the second does. The run ends if a request of a block was not handed over by its transport.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from baton.services.cli.bench.workload.prompts import Vocabulary
from baton.transfer.factory import usable_transports
from bench.harness.model_shapes import SHAPES
from bench.harness.probes import LoopbackProbe
from bench.harness.rotations import (
    Arm,
    Block,
    Finding,
    Remark,
    ResultFile,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.running_system import RunningSystem, running_system
from bench.harness.signals import run_command
from bench.system.deployments import KV_MEMORY_MIB, SPLIT_FLAGS
from bench.system.load_client import LoadClient

METRIC = "baton_transfer_exposed_seconds"
OUTPUT_TOKENS = 2
"""The second token needs the handoff, so its commit is counted by then."""

WAIT_S = 300.0
METRICS_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class ExposedTransferOptions:
    """One run's flags."""

    shape: str
    dtype: str
    transports: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    requests: int
    rotations: int
    seed: int
    result: Path | None


class ExposedTime(NamedTuple):
    """A histogram's sum, in seconds, and its count."""

    total_s: float
    num_handoffs: int


def read_exposed(pages: Sequence[str], transport: str) -> ExposedTime:
    """Sum over all links of a transport, from the text of metrics pages."""
    totals = {"_sum": 0.0, "_count": 0.0}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                ending = sample.name.removeprefix(METRIC)
                if ending in totals and sample.labels.get("transport") == transport:
                    totals[ending] += sample.value
    return ExposedTime(totals["_sum"], int(totals["_count"]))


def arm_of(transport: str, num_tokens: int) -> str:
    return f"{transport}, {num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class TransportTarget:
    """One transport's system and its client."""

    transport: str
    system: RunningSystem
    client: LoadClient

    def exposed(self) -> ExposedTime:
        """The total so far. Raises `OSError`."""
        return read_exposed([_get(url) for url in self.system.metrics_urls], self.transport)

    async def measure(self, num_tokens: int, num_requests: int) -> list[float]:
        """Exposed seconds of all requests, then the TTFT of each. Raises `RuntimeError`."""
        before = self.exposed()
        answers = [await self.client.ask(num_tokens, OUTPUT_TOKENS) for _ in range(num_requests)]
        after = self.exposed()
        if (num_handoffs := after.num_handoffs - before.num_handoffs) != num_requests:
            raise RuntimeError(f"{num_handoffs} of {num_requests} requests were handed over by {self.transport}")
        return [after.total_s - before.total_s, *(answer.deliveries[0].at_s for answer in answers)]


def findings_of(options: ExposedTransferOptions, blocks: Sequence[Block]) -> list[Finding]:
    """The table."""
    findings = []
    for transport in options.transports:
        for num_tokens in options.prompt_tokens:
            arms = (arm_of(transport, num_tokens),)
            findings += [
                make_finding(f"{arms[0]}: first token", "ms", blocks, arms, _first_token_ms),
                make_finding(
                    f"{arms[0]}: exposed", "ms", blocks, arms, lambda g: 1e3 * g[0].values[0] / options.requests
                ),
                make_finding(f"{arms[0]}: exposed / first token", "", blocks, arms, _share),
            ]
    return findings


def _first_token_ms(group: tuple[Block, ...]) -> float:
    return 1e3 * statistics.mean(group[0].values[1:])


def _share(group: tuple[Block, ...]) -> float:
    exposed_s, *first_tokens_s = group[0].values
    return exposed_s / sum(first_tokens_s)


@contextlib.contextmanager
def running_targets(
    options: ExposedTransferOptions, runner: asyncio.Runner, console: Console
) -> Iterator[list[TransportTarget]]:
    """Runs a system for each transport. Raises as `running_system` does."""
    # Imported here: the tested parts need no torch.
    from bench.harness.random_models import save_random_model

    vocabulary = Vocabulary(SHAPES[options.shape].vocab_size, options.seed)
    flags = (*SPLIT_FLAGS, "--dtype", options.dtype, "--kv-memory-mib", str(KV_MEMORY_MIB))
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory, contextlib.ExitStack() as stack:
        model = str(save_random_model(SHAPES[options.shape], Path(directory) / options.shape, seed=options.seed))
        targets = []
        for transport in options.transports:
            words = (*flags, "--transport", transport)
            system = stack.enter_context(running_system(model, None, options.seed, words, console))
            client = LoadClient(system.url, vocabulary, timeout_s=WAIT_S, clock=time.perf_counter)
            stack.callback(_close, runner, client)
            targets.append(TransportTarget(transport, system, client))
        yield targets


def run(options: ExposedTransferOptions, console: Console) -> list[Finding]:
    """Runs all rotations. Raises `RuntimeError` if a request fails or was not handed over."""
    remarks = [
        command_remark("bench.system.exposed_transfer"),
        Remark("system", f"baton up, {options.shape}, {options.dtype}, one prefill and one decode worker a transport"),
    ]
    found, probe = partial(findings_of, options), LoopbackProbe()
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        running_targets(options, runner, console) as targets,
    ):

        def block(target: TransportTarget, num_tokens: int) -> list[float]:
            return runner.run(target.measure(num_tokens, options.requests))

        arms: dict[str, Arm] = {
            arm_of(target.transport, num_tokens): partial(block, target, num_tokens)
            for target in targets
            for num_tokens in options.prompt_tokens
        }
        with console.status("a first prompt of each kind, which does not count"):
            for arm in arms.values():
                arm()
        blocks = rotate(
            arms,
            lambda _: probe(),
            num_rotations=options.rotations,
            seed=options.seed,
            console=console,
            on_rotation=ResultFile(options.result, "exposed", options.rotations, found, remarks).write,
        )
    return found(blocks)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=METRICS_WAIT_S) as answer:
        return str(answer.read().decode())


def _close(runner: asyncio.Runner, client: LoadClient) -> None:
    runner.run(client.close())


def parse(arguments: Sequence[str] | None = None) -> ExposedTransferOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="m150")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--transports", nargs="+", help="default: all that work here")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--requests", type=int, default=1, help="of a block")
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    transports = tuple(flags["transports"] or usable_transports("auto"))
    return ExposedTransferOptions(**{**flags, "transports": transports, "prompt_tokens": tuple(flags["prompt_tokens"])})


def main() -> None:
    """Command line."""
    Console().print(table_of(run(parse(), Console(stderr=True))))


if __name__ == "__main__":
    run_command(main)
