"""Measures the memory that tensors really lie in, from `/proc/self/smaps`, not from what was asked for.

Called when a model is loaded. Knows tensors, no layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SMAPS = Path("/proc/self/smaps")
HUGE_LINES = ("AnonHugePages:", "FilePmdMapped:", "ShmemPmdMapped:")
SHARED_READ_ONLY = "r--s"
"""Permissions of a mapping whose pages every process that maps the file has in common, and none can change."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ")


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes of tensors: all, those on huge pages, and those in shared read-only mappings of a file."""

    num_bytes: int
    huge_bytes: int
    shared_bytes: int

    @property
    def huge_fraction(self) -> float:
        """The share of the bytes on huge pages."""
        return self.huge_bytes / self.num_bytes if self.num_bytes else 0.0


def measure_memory(tensors: Iterable[torch.Tensor]) -> WeightMemory | None:
    """Memory of the tensors; None where the system has no `/proc/self/smaps`.

    Tensors without an address (oneDNN's) count as private bytes on small pages.
    """
    if not SMAPS.is_file():
        return None
    num_bytes, ranges = 0, set()
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.is_cpu:
            ranges.add((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))  # tied weights count once
        else:
            num_bytes += tensor.nbytes
    num_bytes += sum(end - start for start, end in ranges)
    huge = shared = 0
    for low, high, permissions, huge_bytes in _mappings():
        covered = sum(max(0, min(high, end) - max(low, start)) for start, end in ranges)
        huge += min(covered, huge_bytes)
        shared += covered if permissions == SHARED_READ_ONLY else 0
    return WeightMemory(num_bytes, huge, shared)


def _mappings() -> Iterator[tuple[int, int, str, int]]:
    """First address, end, permissions and bytes on huge pages of every mapping."""
    found: re.Match[str] | None = None
    huge = 0
    with SMAPS.open(encoding="utf-8") as lines:
        for line in lines:
            if start := _MAPPING.match(line):
                if found is not None:
                    yield int(found[1], 16), int(found[2], 16), found[3], huge
                found, huge = start, 0
            elif line.startswith(HUGE_LINES):
                huge += int(line.split()[1]) * 1024
    if found is not None:
        yield int(found[1], 16), int(found[2], 16), found[3], huge
