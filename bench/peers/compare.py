"""Baton beside other servers: one random model, the same cores, the same requests, all in one run.

    bench/peers/install.sh DIRECTORY
    python -m bench.peers.compare DIRECTORY [--shape qwen2.5-0.5b] [--peers vllm llama] [--rotations 5] [--result FILE]

All servers run all the time and wait; in every rotation each is measured once with every load, in a random order, by
`baton bench serve`. Prompts go as chats, since not every server takes token ids; every answer's tokens are counted by
its events, and the lengths are the servers' own count. A peer that does not start is named with its last words and left
out; Baton is not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.settings.process import usable_cores
from bench.interruption import run_command
from bench.peers.servers import Server, baton, llama, vllm
from bench.probes import MemcpyProbe
from bench.rotations import Arm, Block, Finding, Record, Remark, command_remark, find, rotate, table_of
from bench.running_system import running_server
from bench.shapes import SHAPES
from services.cli.bench.records import RequestRow
from services.cli.bench.run_file import RunFile, load
from services.cli.plan import free_ports

BATON = "baton"
_LAST_WORDS_CHARS = 400


@dataclass(frozen=True, slots=True)
class Load:
    """Flags of `baton bench serve`, and what is read from its rows: samples, of which the median counts."""

    name: str
    unit: str
    num_prompts: int
    num_words: int
    num_output_tokens: int
    max_concurrency: int
    figures: Callable[[RunFile], list[float]]

    @property
    def flags(self) -> tuple[str, ...]:
        lengths = ("--random-input-len", str(self.num_words), "--random-output-len", str(self.num_output_tokens))
        return ("--num-prompts", str(self.num_prompts), *lengths, "--max-concurrency", str(self.max_concurrency))


@dataclass(frozen=True, slots=True)
class Options:
    """One run's flags."""

    directory: Path
    model_dir: Path | None
    shape: str
    peers: tuple[str, ...]
    dtype: str | None
    baton_dtype: str
    cores: tuple[int, ...]
    rotations: int
    seed: int
    result: Path | None


def _answered(run: RunFile) -> list[RequestRow]:
    """Raises `RuntimeError` when a request failed: a server that drops some has less to do."""
    if failed := [row.failure for row in run.rows if row.failure is not None]:
        raise RuntimeError(f"{len(failed)} of {len(run.rows)} requests failed: {failed[0]}")
    return list(run.rows)


def _ttfts(run: RunFile) -> list[float]:
    return [1e3 * row.ttft_s for row in _answered(run)]


def _tpots(run: RunFile) -> list[float]:
    return [1e3 * row.tpot_s for row in _answered(run) if row.tpot_s is not None]


def _seconds_a_token(run: RunFile) -> list[float]:
    rows = _answered(run)
    return [1e3 * max(row.sent_s + row.ended_s for row in rows) / sum(row.num_output_tokens for row in rows)]


LOADS = (
    Load("first token of a long prompt", "ms", 3, 200, 2, 1, _ttfts),
    Load("one stream", "ms a token", 2, 16, 48, 1, _tpots),
    Load("eight streams", "ms a token of all", 8, 16, 48, 8, _seconds_a_token),
)
"""All in milliseconds, so that a ratio of peer to Baton over 1 is Baton's gain."""


def measure(server: Server, load_: Load, seeds: Iterator[int], directory: Path) -> list[float]:
    """One run of `baton bench serve`. Raises `RuntimeError` when it failed.

    A seed is used once, and the n-th run of every server has the n-th: the same prompts, which none has seen before.
    """
    name = f"{server.name}-{load_.name.replace(' ', '-')}.json"
    asking = ("--endpoint", "chat", "--ignore-eos", "--no-continuous-usage", "--seed", str(next(seeds)))
    saving = ("--save-result", "--result-dir", str(directory), "--result-filename", name)
    command = [sys.executable, "-m", "services.cli.main", "bench", "serve", "--base-url", server.url]
    command += [*asking, *load_.flags, *saving]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"{server.name}, {load_.name}: {ran.stderr[-_LAST_WORDS_CHARS:]}")
    return load_.figures(load(directory / name))


def arm_name(server: str, load_: Load) -> str:
    return f"{server}: {load_.name}"


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """Every server's times, and every peer's over Baton's."""
    servers = sorted({block.arm.partition(": ")[0] for block in blocks})
    findings = []
    for load_ in LOADS:
        for server in servers:
            arm = arm_name(server, load_)
            findings.append(find(arm, load_.unit, blocks, (arm,), lambda group: _median(group[0])))
        for peer in [server for server in servers if server != BATON]:
            arms = (arm_name(peer, load_), arm_name(BATON, load_))
            findings.append(find(f"{load_.name}: {peer} / baton", "", blocks, arms, _ratio))
    return findings


@contextlib.contextmanager
def running(servers: Sequence[Server], console: Console) -> Iterator[tuple[list[Server], list[Remark]]]:
    """Those that started, and a remark on each that did not. Raises `RuntimeError` when Baton is among those."""
    with contextlib.ExitStack() as stack:
        started, remarks = [], []
        for server in servers:
            try:
                with console.status(f"starting {server.name}"):
                    stack.enter_context(running_server(server.command, server.url, server.ready_path, server.variables))
                started.append(server)
            except (RuntimeError, TimeoutError, OSError) as error:
                if server.name == BATON:
                    raise
                remarks.append(
                    Remark(f"{server.name} did not start", " ".join(str(error).split())[-_LAST_WORDS_CHARS:])
                )
        yield started, remarks


def run(options: Options, console: Console) -> tuple[list[Finding], list[Remark]]:
    """Measures all servers that start."""
    with tempfile.TemporaryDirectory(prefix="baton-peers-") as directory:
        servers = _servers(options, Path(directory), console)
        probe = MemcpyProbe()
        with running(servers, console) as (started, left_out):
            arms: dict[str, Arm] = {
                arm_name(server.name, load_): partial(
                    measure, server, load_, itertools.count(options.seed), Path(directory)
                )
                for server in started
                for load_ in LOADS
            }
            remarks = [command_remark("bench.peers.compare"), *left_out]
            blocks = rotate(
                arms,
                lambda _: probe(),
                num_rotations=options.rotations,
                seed=options.seed,
                console=console,
                on_rotation=Record(options.result, "peers", options.rotations, findings_of, remarks).keep,
            )
    return findings_of(blocks), remarks


def parse(arguments: Sequence[str] | None = None) -> Options:
    """From the command line."""
    known = [name for name, shape in SHAPES.items() if shape.family == "qwen2"]  # what make_gguf.py has names for
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of bench/peers/install.sh")
    parser.add_argument("--model-dir", type=Path, help="a model of `bench.random_models`; default: one is made")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=known)
    parser.add_argument("--peers", nargs="*", default=["vllm", "llama"], choices=("vllm", "llama"))
    parser.add_argument("--dtype", help="of vLLM; default: bfloat16 where this CPU multiplies it, else float32")
    parser.add_argument("--baton-dtype", default="auto")
    parser.add_argument("--cores", nargs="+", type=int, default=usable_cores())
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    return Options(**{**flags, "peers": tuple(flags["peers"]), "cores": tuple(flags["cores"])})


def main() -> None:
    """Command line."""
    options = parse()
    findings, remarks = run(options, Console(stderr=True))
    console = Console()
    for remark in remarks:
        console.print(f"{remark.name}: {remark.words}", markup=False, highlight=False)
    console.print(table_of(findings))


def _servers(options: Options, directory: Path, console: Console) -> list[Server]:
    model = options.model_dir or directory / options.shape
    if not (model / "config.json").is_file():
        with console.status(f"making a random {options.shape}"):
            subprocess.run([sys.executable, "-m", "bench.random_models", options.shape, str(model)], check=True)
    ports, cores = free_ports(3), options.cores
    servers = [baton(model, ports[0], cores, options.baton_dtype)]
    if "vllm" in options.peers:
        servers.append(vllm(model, ports[1], cores, options.dtype or _fast_dtype(), options.directory / "vllm"))
    if "llama" in options.peers:
        gguf, venv = directory / "model.gguf", options.directory / "llama"
        script = Path(__file__).with_name("make_gguf.py")
        with console.status("writing the model for llama.cpp"):
            subprocess.run([str(venv / "bin" / "python"), str(script), str(model), str(gguf)], check=False)
        servers.append(llama(gguf, ports[2], cores, venv))
    return servers


def _fast_dtype() -> str:
    # Imported here: it brings torch, which nothing else of this process needs.
    from baton.model.config import has_bfloat16_arithmetic

    return "bfloat16" if has_bfloat16_arithmetic() else "float32"


def _median(block: Block) -> float:
    return statistics.median(block.values)


def _ratio(group: tuple[Block, ...]) -> float:
    return _median(group[0]) / _median(group[1])


if __name__ == "__main__":
    run_command(main)
