"""Commands that start Baton and its peers on one model, the same cores and one port each.

Called by `bench.peers.compare`. A peer gets one compute thread a core, in one engine; Baton what `baton up` gives its
workers. Prefix caches are off where possible; the loads share no prefixes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BATON = "baton"
MODEL_NAME = "m"
MAX_MODEL_LEN = 4096
LLAMA_SLOTS = 16
LLAMA_SLOT_TOKENS = 2304
"""The longest prompt of the loads, and more than a stream beside prompts has."""

AUTO = "auto"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A command that serves OpenAI's API on `port`, ready when `ready_path` answers 200."""

    name: str
    command: tuple[str, ...]
    port: int
    ready_path: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def baton(
    model: Path,
    port: int,
    cores: tuple[int, ...],
    dtype: str,
    deployment: str = AUTO,
    threads: int = 0,
    lends: bool = True,
) -> PeerServer:
    """`baton up`. `deployment`: auto (`baton up` chooses), split or colocated. `threads`: of a worker; 0: its default.

    `lends`: an idle worker's cores are lent to the other.
    """
    flags = ["up", str(model), f"--port={port}", f"--dtype={dtype}", f"--deployment={deployment}"]
    words = [BATON] if deployment == AUTO else [BATON, deployment]
    if threads:
        flags.append(f"--threads={threads}")
        words.append(f"{threads} thread{'s' if threads > 1 else ''}")
    if not lends:
        flags.append("--no-lend-cores")
        words.append("own cores")
    command = _on_cores(cores, sys.executable, "-m", "baton.services.cli.entry", *flags)
    return PeerServer(", ".join(words), command, port, "/ready")


def is_baton(server: str) -> bool:
    """True for the name of a server made by `baton`."""
    return server.partition(",")[0] == BATON


def vllm(model: Path, port: int, cores: tuple[int, ...], dtype: str, venv: Path) -> PeerServer:
    """vLLM's CPU build. Its default (`auto`) keeps one of two cores idle, so cores are named."""
    flags = (f"--served-model-name={MODEL_NAME}", f"--dtype={dtype}", f"--max-model-len={MAX_MODEL_LEN}")
    command = (str(venv / "bin" / "vllm"), "serve", str(model), *flags, f"--port={port}", "--no-enable-prefix-caching")
    binding = ",".join(map(str, cores))
    variables = {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return PeerServer("vllm", _on_cores(cores, *command), port, "/health", {**_OFFLINE, **variables})


def llama(gguf: Path, port: int, cores: tuple[int, ...], binary: Path) -> PeerServer:
    """llama.cpp's `llama-server` with slots and continuous batching, on CPUs only."""
    threads = str(len(cores))
    command = (
        *(str(binary), "--model", str(gguf), "--alias", MODEL_NAME, "--port", str(port), "--device", "none"),
        *("-np", str(LLAMA_SLOTS), "-cb", "--ctx-size", str(LLAMA_SLOTS * LLAMA_SLOT_TOKENS)),
        *("--threads", threads, "--threads-batch", threads, "--no-cache-prompt", "--cache-ram", "0", "--no-webui"),
    )
    return PeerServer("llama", _on_cores(cores, *command), port, "/health", {"OMP_NUM_THREADS": threads})


def openvino(gguf: Path, port: int, cores: tuple[int, ...], dtype: str, venv: Path) -> PeerServer:
    """OpenVINO GenAI's continuous batching behind `openvino_server.py`."""
    script = Path(__file__).with_name("openvino_server.py")
    precision = "bf16" if dtype == "bfloat16" else "f32"
    flags = (f"--port={port}", f"--threads={len(cores)}", f"--precision={precision}", f"--rows={LLAMA_SLOTS}")
    command = _on_cores(cores, str(venv / "bin" / "python"), str(script), str(gguf), *flags)
    return PeerServer("openvino", command, port, "/v1/models", {"OPENVINO_TELEMETRY_DISABLE": "1"})


def _on_cores(cores: tuple[int, ...], *command: str) -> tuple[str, ...]:
    return ("taskset", "--cpu-list", ",".join(map(str, cores)), *command)
