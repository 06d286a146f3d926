"""Commands that start Baton and its peers on one model, the same cores and one port each.

Called by `bench.peers.compare`. Every server gets one compute thread a core: peers in one engine, Baton one a worker,
or more, which then share the cores. Prefix caches are off where possible; the loads share no prefixes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BATON = "baton"
MODEL_NAME = "m"
MAX_MODEL_LEN = 4096
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
    model: Path, port: int, cores: tuple[int, ...], dtype: str, threads: int = 1, lends: bool = True
) -> PeerServer:
    """Baton with a prefill and a decode worker. With one thread each has a core; with two both share both cores.

    `lends`: an idle worker's cores are lent to the other.
    """
    flags = ["up", str(model), f"--port={port}", f"--dtype={dtype}", f"--threads={threads}"]
    name = BATON if threads == 1 else f"{BATON}, {threads} threads"
    if not lends:
        flags.append("--no-lend-cores")
        name = f"{name}, own cores"
    return PeerServer(name, _on_cores(cores, sys.executable, "-m", "baton.services.cli.main", *flags), port, "/ready")


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


def llama(gguf: Path, port: int, cores: tuple[int, ...], venv: Path) -> PeerServer:
    """llama-cpp-python's server, which answers one request at a time."""
    threads = str(len(cores))
    command = (
        *(str(venv / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(gguf)),
        *("--model_alias", MODEL_NAME, "--n_ctx", str(MAX_MODEL_LEN), "--n_batch", "2048"),
        *("--n_threads", threads, "--n_threads_batch", threads, "--port", str(port)),
        *("--interrupt_requests", "false"),  # else the next request aborts the running one
    )
    return PeerServer("llama", _on_cores(cores, *command), port, "/v1/models", {"OMP_NUM_THREADS": threads})


def _on_cores(cores: tuple[int, ...], *command: str) -> tuple[str, ...]:
    return ("taskset", "--cpu-list", ",".join(map(str, cores)), *command)
