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
SHARED_READ_ONLY = "r--s"
"""Permissions of a mapping whose pages every process that maps the file has in common, and none can change."""
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ", re.MULTILINE)
_HUGE = re.compile(rb"^(?:AnonHugePages|FilePmdMapped|ShmemPmdMapped): +(\d+) kB", re.MULTILINE)


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
    ordered = sorted(ranges)
    if not ordered:
        return WeightMemory(num_bytes, 0, 0)
    first, last = ordered[0][0], max(end for _, end in ordered)
    huge = shared = 0
    for low, high, permissions, huge_bytes in _mappings(SMAPS.read_bytes(), first, last):
        covered = sum(max(0, min(high, end) - max(low, start)) for start, end in ordered)
        huge += min(covered, huge_bytes)
        shared += covered if permissions == SHARED_READ_ONLY else 0
    return WeightMemory(num_bytes, huge, shared)


def _mappings(smaps: bytes, first: int, last: int) -> Iterator[tuple[int, int, str, int]]:
    """First address, end, permissions and bytes on huge pages of every mapping that meets `first` to `last`.

    A process with torch has more than a thousand mappings of 25 lines each; few of them hold weights.
    """
    headers = list(_MAPPING.finditer(smaps))
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        low, high = int(header[1], 16), int(header[2], 16)
        if high > first and low < last:
            fields = smaps[header.end() : None if following is None else following.start()]
            yield low, high, header[3].decode(), 1024 * sum(int(number) for number in _HUGE.findall(fields))
