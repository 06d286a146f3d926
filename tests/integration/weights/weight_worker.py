"""A process that loads a model as a worker does, and tells what became of its weights.

    python -m tests.integration.weights.weight_worker MODEL CACHE SHARING

Writes a line when everything is imported, another one when the engine is built, and ends when its standard input
closes. Tests read its memory from `/proc/PID` meanwhile, and kill it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from baton.engine import build
from baton.engine.build import Engine, build_engine
from baton.settings.choices import Dtype, WeightSharingKind
from baton.settings.groups import WorkerSettings
from baton.telemetry import metrics

POOL_MIB = 8
MODULE = "tests.integration.weights.weight_worker"
IMPORTED, LOADED = "imported", "loaded"
PACKING, PACKED, WAIT = WEIGHT_EVENTS = ("weights_packing", "weights_packed", "weights_wait")


class WeightWorker:
    """Such a process, seen by a test."""

    def __init__(self, model: Path, cache: Path, sharing: WeightSharingKind = WeightSharingKind.ALWAYS) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.integration.weights.weight_worker",
            str(model),
            str(cache),
            sharing.value,
        ]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.events: list[str] = []

    def read(self, event: str) -> dict[str, object]:
        """The line of `event`; lines before it are kept in `events`."""
        assert self.popen.stdout is not None
        for text in self.popen.stdout:
            if text.startswith("{"):
                line = json.loads(text)
                assert isinstance(line, dict)
                self.events.append(line["event"])
                if line["event"] == event:
                    return line
        raise AssertionError(f"it ended after {self.events}")

    def go(self) -> None:
        """Lets the process load."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def pss_bytes(self) -> int:
        """Its proportional set size, as the kernel counts it."""
        return sum(self._pss("smaps_rollup").values())

    def file_pss_bytes(self) -> int:
        """Its proportional part of weight files."""
        return sum(size for path, size in self._pss("smaps").items() if path.endswith(".weights"))

    def _pss(self, source: str) -> dict[str, int]:
        """Bytes by what is mapped."""
        sizes: defaultdict[str, int] = defaultdict(int)
        path = ""
        for line in Path(f"/proc/{self.popen.pid}/{source}").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                path = words[-1]
            elif words[0] == "Pss:":
                sizes[path] += int(words[1]) * 1024
        return sizes

    def kill(self) -> None:
        """Ends it at once."""
        self.popen.kill()
        self.popen.communicate(timeout=20.0)


def write(event: str, **fields: object) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def load(model: str, cache: str, sharing: str) -> Engine:
    """The engine. Log events about weight files are written as lines, too."""
    logged = build.log.info

    def info(event: str, **fields: object) -> None:
        logged(event, **fields)
        if event in WEIGHT_EVENTS:
            write(event)

    setattr(build.log, "info", info)  # noqa: B010 - a method, to mypy
    settings = WorkerSettings(
        model=model,
        port=0,
        metrics_port=0,
        dtype=Dtype.FLOAT32,
        kv_memory_mib=POOL_MIB,
        weight_cache_dir=Path(cache),
        weight_sharing=WeightSharingKind(sharing),
    )
    return build_engine(settings, None)


def main() -> None:
    """Command line."""
    write(IMPORTED)
    sys.stdin.readline()
    began, cpu_began = time.monotonic(), time.process_time()
    engine = load(*sys.argv[1:])
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
    kinds = ("shared", "private")
    sizes = {kind: metrics.REGISTRY.get_sample_value("baton_weights_bytes", {"memory": kind}) for kind in kinds}
    write(LOADED, seconds=seconds, cpu_seconds=cpu_seconds, fingerprint=engine.fingerprint.digest, **sizes)
    sys.stdin.read()


if __name__ == "__main__":
    main()
