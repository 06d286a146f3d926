"""Runs the probes in child processes with deadlines, and turns their answers into results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.services.cli.doctor import engine_probe, loopback_probe
from baton.services.cli.doctor.devices import TorchDevices
from baton.services.cli.doctor.results import DoctorResult, fail, ok, warn

DEADLINE_S = 120.0
"""Of one probe. Importing torch on a loaded machine takes most of it."""
_MAX_SHOWN_CHARS = 300
_GIB = 1024**3
_MIN_HUGE_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The JSON of a probe, or the reason why there is none."""

    facts: dict[str, Any] | None
    error: str = ""


async def run_probe(module: str, *arguments: str, marker: str = "", deadline_s: float = DEADLINE_S) -> ProbeAnswer:
    """Runs `python -m module` and reads the last line that starts with `marker` and `{`. Kills it at the deadline."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), deadline_s)
    except TimeoutError:
        return ProbeAnswer(None, f"no answer within {deadline_s:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    lines = [line for line in out.decode(errors="replace").splitlines() if line.startswith(marker + "{")]
    if lines and process.returncode == 0:
        return ProbeAnswer(json.loads(lines[-1].removeprefix(marker)))
    return ProbeAnswer(None, _ending(process.returncode, err.decode(errors="replace").splitlines()))


def _ending(code: int | None, errors: Sequence[str]) -> str:
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    return f"{how}: {errors[-1][:_MAX_SHOWN_CHARS]}" if errors else how


async def ask_engine() -> ProbeAnswer:
    """What a worker of this environment would compute with."""
    return await run_probe(engine_probe.__name__)


async def ask_loopback(*arguments: str) -> ProbeAnswer:
    """Moves 64 MiB between two processes over NIXL."""
    return await run_probe(loopback_probe.__name__, *arguments, marker=loopback_probe.MARKER)


def torch_devices(answer: ProbeAnswer) -> TorchDevices | None:
    """The GPUs that the engine probe saw; None if it did not answer."""
    if answer.facts is None:
        return None
    return TorchDevices(answer.facts["cuda_build"], tuple(answer.facts["gpus"]), answer.facts["gpu_error"])


def engine_results(answer: ProbeAnswer) -> Iterator[DoctorResult]:
    """Kernels in use, bfloat16, and the share of a test buffer that the kernel really put on huge pages."""
    facts = answer.facts
    if facts is None:
        yield fail("kernels", f"torch does not run here: {answer.error}", "reinstall it: make install")
        return
    if facts["level"] is None:
        fix = "install a C++ compiler (Debian: apt install g++), then make kernels"
        yield fail("kernels", f"{facts['note']}; torch computes, several times slower", fix)
    elif "not " in facts["note"]:
        yield warn("kernels", facts["note"], "make kernels, and report the wrong level if that does not help")
    else:
        yield ok("kernels", f"{facts['note']} run and agree with torch {facts['torch']}")
    yield ok("bfloat16", "in hardware" if facts["bfloat16"] else "emulated; --dtype auto takes float32")
    huge = facts["huge_fraction"]
    if huge is not None and huge < _MIN_HUGE_FRACTION:
        fix = "free memory (echo 1 | sudo tee /proc/sys/vm/compact_memory), and see the line about huge pages"
        yield warn("huge pages given", f"{huge:.0%} of a 16 MiB buffer", fix)
    elif huge is not None:
        yield ok("huge pages given", f"{huge:.0%} of a 16 MiB buffer")
    in_file = facts.get("file_huge_fraction")
    if in_file is not None:
        kept = "can be shared" if in_file >= _MIN_HUGE_FRACTION else "stay private unless --weight-sharing is always"
        yield ok("huge pages in files", f"{in_file:.0%} of a mapped file of 16 MiB: weights {kept}")


def loopback_result(answer: ProbeAnswer) -> DoctorResult:
    """NIXL moved pages whose digests match, over the transport that UCX reports."""
    name, facts = "nixl loopback", answer.facts
    if facts is None or "error" in facts:
        why = answer.error if facts is None else facts["error"]
        fix = "run workers with --transport stream until it works; UCX_LOG_LEVEL=info shows what UCX found"
        return fail(name, why, fix)
    speed = facts["bytes"] / facts["seconds"] / _GIB
    found = f"{facts['pages']} pages, {speed:.1f} GiB/s over {facts['path']}, all digests match"
    if "tcp" in facts["path"]:
        fix = (
            "allow copies between processes: sysctl kernel.yama.ptrace_scope=0, containers with one PID and IPC"
            " namespace, no UCX_TLS=tcp"
        )
        return warn(name, f"{found}; on one host it should be cma", fix)
    return ok(name, found)
