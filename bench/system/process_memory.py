"""What the memory of `baton up` is: proportional set sizes (PSS) of its processes, by kind.

    python -m bench.system.process_memory MODEL [--markdown FILE] [-- FLAG...]

Starts `baton up MODEL` with the flags behind `--`, waits until it is ready and its memory stays as it is, and reads
`/proc/PID/smaps` of each process. Linux only. Kinds:

- `weights`: mapped weight files; `pool`: anonymous mappings that are advised to be on huge pages;
- `shared`: other anonymous pages that several processes have: what the fork server has made and nobody has changed;
- `own`: those of one process: its heaps, its stacks, and what it has changed of shared ones;
- `code`: pages of files as they are on disk; `data`: pages of files that a process has changed, as libraries' tables;
- `segments`: writable memory that processes share, of transports.

A page that `n` processes have counts `1 / n` for each. Processes beside the cluster that map the same libraries make
`code` smaller.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.services.cli.processes.ports import free_ports
from bench.harness.probes import process_tree
from bench.harness.running_system import running_server

KINDS = ("weights", "pool", "shared", "own", "code", "data", "segments")
KIB = 1024
MIB = 2**20
STEADY_BYTES = MIB
"""Two readings that differ by less are of memory that stays as it is."""
READ_EVERY_S = 0.5
MAX_READINGS = 120
_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ \S+ *(.*)$")
_HUGE_PAGES = "hg"
"""Flag of a mapping that is advised to be on huge pages."""


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """One mapping of a process. `path`: "" for anonymous memory; `flags`: of `VmFlags`; the rest in bytes."""

    permissions: str
    path: str
    flags: frozenset[str]
    pss: int
    own: int
    dirty: int

    def by_kind(self) -> Iterator[tuple[str, int]]:
        """Its PSS by kind."""
        if self.path.endswith(".weights"):
            yield "weights", self.pss
        elif self.path.startswith("/"):
            if self.permissions.startswith("rw") and self.permissions.endswith("s"):
                yield "segments", self.pss
            else:
                dirty = min(self.dirty, self.pss)
                yield "data", dirty
                yield "code", self.pss - dirty
        elif _HUGE_PAGES in self.flags:
            yield "pool", self.pss
        else:
            yield "own", self.own
            yield "shared", self.pss - self.own


def read_mappings(smaps: str) -> Iterator[MappedMemory]:
    """The mappings in the content of `/proc/PID/smaps`."""
    permissions, path, sizes = "", "", Counter[str]()
    for line in smaps.splitlines():
        if (header := _HEADER.match(line)) is not None:
            permissions, path, sizes = header[1], header[2], Counter()
            continue
        name, _, value = line.partition(":")
        if name != "VmFlags":  # the last line of a mapping
            sizes[name] = int(value.split()[0]) * KIB
            continue
        own = sizes["Private_Clean"] + sizes["Private_Dirty"]
        yield MappedMemory(permissions, path, frozenset(value.split()), sizes["Pss"], own, sizes["Pss_Dirty"])


def read_process(pid: int) -> Counter[str]:
    """PSS of a process by kind, in bytes. Raises `OSError`."""
    found = Counter[str]()
    for mapping in read_mappings(Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")):
        for kind, size in mapping.by_kind():
            found[kind] += size
    return found


def name_of(arguments: Sequence[str]) -> str:
    """What a process of `baton up` is, by its arguments."""
    if "serve" in arguments[:-1]:
        return arguments[arguments.index("serve") + 1]
    for word in arguments:
        if word.endswith("fork_program"):
            return "fork server"
        if "redis-server" in word:
            return "Redis"
    return "baton up" if "up" in arguments else Path(arguments[0]).name


def read_system(pid: int) -> dict[str, Counter[str]]:
    """PSS by kind of `baton up` and of all its processes, by their names, as soon as it stays as it is.

    Raises `OSError` if a process ends, `TimeoutError` if memory changes all the time.
    """
    before = -STEADY_BYTES
    for _ in range(MAX_READINGS):
        found: dict[str, Counter[str]] = {}
        for each in process_tree(pid):
            name = name_of(Path(f"/proc/{each}/cmdline").read_text(errors="replace").split("\0"))
            found[f"{name} {each}" if name in found else name] = read_process(each)
        total = sum(sizes.total() for sizes in found.values())
        if abs(total - before) < STEADY_BYTES:
            return found
        before = total
        time.sleep(READ_EVERY_S)
    raise TimeoutError(f"memory still changes after {MAX_READINGS} readings")


def report(found: Mapping[str, Mapping[str, int]]) -> str:
    """Tables in Markdown, in MiB."""
    lines = [f"| PSS, MiB | {' | '.join(KINDS)} | all |", "|---" * (len(KINDS) + 2) + "|"]
    totals = Counter[str]()
    for name, sizes in found.items():
        totals.update(sizes)
        lines.append(_row(name, sizes))
    lines.append(_row("all", totals))
    if totals["weights"]:
        ratio = (totals.total() - totals["pool"]) / totals["weights"]
        lines += ["", f"(PSS - pools) / weights: {ratio:.2f}"]
    return "\n".join(lines) + "\n"


def _row(name: str, sizes: Mapping[str, int]) -> str:
    cells = [f"{sizes.get(kind, 0) / MIB:.1f}" for kind in KINDS]
    return f"| {name} | {' | '.join(cells)} | {sum(sizes.values()) / MIB:.1f} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("flags", nargs="*", help="flags of `baton up`, behind `--`")
    parser.add_argument("--markdown", type=Path)
    chosen = parser.parse_args()
    (port,) = free_ports(1)
    up = [sys.executable, "-m", "baton.services.cli.entry", "up", chosen.model, "--port", str(port), *chosen.flags]
    with running_server(up, f"http://127.0.0.1:{port}", "/ready") as server:
        text = report(read_system(server.pid))
    sys.stdout.write(text)
    if chosen.markdown:
        chosen.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
