"""Compares Baton with other servers in turns: one random model, the same cores, the same requests.

    bench/peers/install.sh DIRECTORY
    python -m bench.peers.compare DIRECTORY [--shape qwen2.5-0.5b] [--peers vllm llama openvino]
        [--baton auto split colocated] [--baton-threads 1 2] [--own-cores] [--rotations 5] [--result FILE]

An idle server may spin on the cores of the others. So in every rotation each server, in a random order, is started,
warmed up with short answers, measured once with every load in a random order, and stopped before the next one starts.
In one rotation all of them get prompts of the same token ids, except beside streams (`bench.peers.beside_prompts`). An
answer's tokens are counted by its events; a prompt's are the server's own count. A peer that does not start, or that
fails a request, is skipped in that rotation, with a remark that has the end of its log. When Baton fails, the run ends.
The last lines of the table name the figures in which a peer was better.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.services.cli.processes.ports import free_ports
from baton.settings.process import usable_cores
from bench.harness.model_shapes import SHAPES
from bench.harness.probes import MemcpyProbe, tree_pss_bytes
from bench.harness.rotations import (
    Arm,
    Block,
    ExclusiveArms,
    Finding,
    Remark,
    ResultFile,
    command_remark,
    make_finding,
    rotate_exclusive,
    table_of,
)
from bench.harness.running_system import running_server
from bench.harness.signals import run_command
from bench.peers.beside_prompts import measure_beside_prompts
from bench.peers.loads import (
    BESIDE_PROMPTS,
    ERROR_TAIL_CHARS,
    LOADS,
    REPORT_LINES,
    START,
    PeerLoad,
    ReportLine,
    measure,
)
from bench.peers.servers import AUTO, PeerServer, baton, is_baton, llama, openvino, vllm

PEERS = ("vllm", "llama", "openvino")
LLAMA_SERVER = Path("llama", "bin", "llama-server-vulkan")


@dataclass(frozen=True, slots=True)
class PeerComparisonOptions:
    """One run's flags."""

    directory: Path
    model_dir: Path | None
    shape: str
    peers: tuple[str, ...]
    dtype: str | None
    llama_server: Path | None
    baton: tuple[str, ...]
    baton_dtype: str
    baton_threads: tuple[int, ...]
    own_cores: bool
    cores: tuple[int, ...]
    rotations: int
    seed: int
    result: Path | None


@dataclass(frozen=True, slots=True)
class PromptSeeds:
    """Seeds of prompts: equal for all servers and never repeated, so no cache holds a measured prompt."""

    first: int
    rotation: int

    def measured(self, load: PeerLoad) -> int:
        return self.first + 2 * (self.rotation * len(LOADS) + LOADS.index(load))

    def warm_up(self, load: PeerLoad) -> int:
        return self.measured(load) + 1

    def beside_prompts(self) -> int:
        return self.first + self.rotation


@contextlib.contextmanager
def server_arms(
    server: PeerServer, first_seed: int, directory: Path, console: Console, rotation: int
) -> Iterator[dict[str, Arm]]:
    """Runs a server, warms it up and yields an arm for every load.

    Raises as `running_server` does, and `RuntimeError` if a request fails.
    """
    seeds = PromptSeeds(first_seed, rotation)
    with contextlib.ExitStack() as stack:
        with console.status(f"starting {server.name}"):
            running = stack.enter_context(
                running_server(server.command, server.url, server.ready_path, server.variables)
            )
            for load in LOADS:
                measure(server, load.warm_up, seeds.warm_up(load), directory)
        start = [running.start_s, float(tree_pss_bytes(running.pid))]
        loads: dict[str, Arm] = {
            load.name: partial(measure, server, load, seeds.measured(load), directory) for load in LOADS
        }
        loads |= {BESIDE_PROMPTS: partial(measure_beside_prompts, server.url, seeds.beside_prompts())}
        yield {arm_name(server.name, name): arm for name, arm in (loads | {START: lambda: start}).items()}


def arm_name(server: str, load: str) -> str:
    return f"{server}: {load}"


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """Figures of every server, and those of every peer over Baton's where less is better."""
    servers = sorted({block.arm.partition(": ")[0] for block in blocks})
    return [finding for line in REPORT_LINES for finding in _findings(line, servers, blocks)]


def _findings(line: ReportLine, servers: Sequence[str], blocks: Sequence[Block]) -> Iterator[Finding]:
    arms = {server: arm_name(server, line.load) for server in servers}
    reported = [block for block in blocks if block.arm in arms.values() and line.of(block) is not None]
    rotations = {server: {block.rotation for block in reported if block.arm == arms[server]} for server in servers}
    for server in [server for server in servers if rotations[server]]:
        arm = (arms[server],)
        yield make_finding(f"{server}: {line.name}", line.unit, reported, arm, lambda group: _figure(line, group[0]))
    pairs = [(peer, own) for peer in servers for own in servers if is_baton(own) and not is_baton(peer)]
    for peer, own in pairs:
        if line.compared and rotations[peer] & rotations[own]:
            name = f"{line.name}: {peer} / {own}"
            yield make_finding(name, "", reported, (arms[peer], arms[own]), partial(_ratio, line))


def _figure(line: ReportLine, block: Block) -> float:
    value = line.of(block)
    assert value is not None
    return value


def _ratio(line: ReportLine, group: tuple[Block, ...]) -> float:
    return _figure(line, group[0]) / _figure(line, group[1])


def lost_lines(findings: Sequence[Finding]) -> list[str]:
    """Lines with a peer's figure over Baton's below 1: of each, by how much, the worst first."""
    ratios = [finding for finding in findings if " / " in finding.name and finding.overall.median < 1.0]
    return [
        f"{found.name}: {found.overall.median:.3g} [{found.overall.low:.3g}, {found.overall.high:.3g}]"
        for found in sorted(ratios, key=lambda found: found.overall.median)
    ]


def failure_remark(rotation: int, server: str, error: Exception) -> Remark:
    """A remark on a skipped peer. Raises the error if it is Baton's."""
    if is_baton(server):
        raise error
    words = " ".join(str(error).split())[-ERROR_TAIL_CHARS:]
    return Remark(f"{server} was left out of rotation {rotation + 1}", words)


def run(options: PeerComparisonOptions, console: Console) -> tuple[list[Finding], list[Remark]]:
    """Runs all rotations. Raises `RuntimeError` and `OSError` if Baton fails."""
    with tempfile.TemporaryDirectory(prefix="baton-peers-") as directory:
        turns: Mapping[str, ExclusiveArms] = {
            server.name: partial(server_arms, server, options.seed, Path(directory), console)
            for server in _servers(options, Path(directory), console)
        }
        remarks = [command_remark("bench.peers.compare")]
        probe = MemcpyProbe()
        blocks = rotate_exclusive(
            turns,
            lambda _: probe(),
            num_rotations=options.rotations,
            seed=options.seed,
            console=console,
            on_failure=lambda *failure: remarks.append(failure_remark(*failure)),
            on_rotation=ResultFile(options.result, "peers", options.rotations, findings_of, remarks).write,
        )
    return findings_of(blocks), remarks


def parse(arguments: Sequence[str] | None = None) -> PeerComparisonOptions:
    """From the command line."""
    known = [name for name, shape in SHAPES.items() if shape.family == "qwen2"]  # families that make_gguf.py knows
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of bench/peers/install.sh")
    parser.add_argument("--model-dir", type=Path, help="a model of `bench.harness.random_models`; default: one is made")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=known)
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    parser.add_argument("--llama-server", type=Path, help="a binary; default: the one of install.sh")
    parser.add_argument("--dtype", help="of peers; default: bfloat16 where this CPU multiplies it, else float32")
    parser.add_argument("--baton", nargs="+", default=[AUTO], choices=(AUTO, "split", "colocated"))
    parser.add_argument("--baton-dtype", default="auto")
    parser.add_argument(
        "--baton-threads", nargs="+", type=int, default=[0], help="a worker's; 0: as `baton up` chooses"
    )
    parser.add_argument("--own-cores", action="store_true", help="also Baton whose workers lend each other no core")
    parser.add_argument("--cores", nargs="+", type=int, default=usable_cores())
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    lists = {name: tuple(dict.fromkeys(flags[name])) for name in ("peers", "baton", "baton_threads", "cores")}
    return PeerComparisonOptions(**{**flags, **lists})


def main() -> None:
    """Command line."""
    options = parse()
    findings, remarks = run(options, Console(stderr=True))
    console = Console()
    for remark in remarks:
        console.print(f"{remark.name}: {remark.text}", markup=False, highlight=False)
    console.print(table_of(findings))
    for line in lost_lines(findings):
        console.print(f"Baton is behind: {line}", markup=False, highlight=False)


def _servers(options: PeerComparisonOptions, directory: Path, console: Console) -> list[PeerServer]:
    model = options.model_dir or directory / options.shape
    if not (model / "config.json").is_file():
        with console.status(f"making a random {options.shape}"):
            subprocess.run([sys.executable, "-m", "bench.harness.random_models", options.shape, str(model)], check=True)
    cores, root, dtype = options.cores, options.directory, options.dtype or _fast_dtype()
    lends = (True, False) if options.own_cores else (True,)
    arms = [(name, threads, lent) for name in options.baton for threads in options.baton_threads for lent in lends]
    ports = iter(free_ports(len(arms) + len(options.peers)))
    servers = [baton(model, next(ports), cores, options.baton_dtype, *arm) for arm in arms]
    if "vllm" in options.peers:
        servers.append(vllm(model, next(ports), cores, dtype, root / "vllm"))
    if "llama" in options.peers:
        gguf, binary = directory / "model.gguf", options.llama_server or root / LLAMA_SERVER
        _write_gguf(root / "llama", model, gguf, console)
        servers.append(llama(gguf, next(ports), cores, binary))
    if "openvino" in options.peers:
        gguf = directory / "float16.gguf"
        _write_gguf(root / "openvino", model, gguf, console, "--float16")
        servers.append(openvino(gguf, next(ports), cores, dtype, root / "openvino"))
    return servers


def _write_gguf(venv: Path, model: Path, gguf: Path, console: Console, *flags: str) -> None:
    """If this fails, the server fails too and is named."""
    script = Path(__file__).with_name("make_gguf.py")
    with console.status(f"writing {gguf.name}"), contextlib.suppress(OSError):
        subprocess.run([str(venv / "bin" / "python"), str(script), str(model), str(gguf), *flags], check=False)


def _fast_dtype() -> str:
    # Imported here: it loads torch, which this process does not need otherwise.
    from baton.model.cpu import has_bfloat16_arithmetic

    return "bfloat16" if has_bfloat16_arithmetic() else "float32"


if __name__ == "__main__":
    run_command(main)
