"""Ceilings of one core: its fastest memory read and its fastest matrix product.

The engine's experiments read them before and after every block. A low ceiling would flatter, so several ways of doing
the same work are tried at the start, and the fastest is the probe from then on. A reading is the best of a few tries,
by the thread's CPU time, which other processes can only increase. One thread must do all the work, so limit numeric
libraries to one thread before loading them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear

from baton.model.huge_pages import huge_empty, huge_fraction

READ_BYTES = 384 * 1024 * 1024
"""Far more than any cache that a core may count on."""
NUM_TRIES = 3
NUM_SEARCH_TRIES = 6
_GEMM_SHAPE = (512, 1024, 2048)  # rows, inner, columns
_PACK_HINT = 512


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The fastest of several candidates: its name, its speed in the comparison, and all speeds by name."""

    name: str
    speed: float
    speeds: tuple[tuple[str, float], ...]


def find_ceiling(candidates: Mapping[str, Callable[[], object]], work: float) -> Ceiling:
    """Tries all `candidates` in turns. `work`: bytes or operations of each. Raises `ValueError` for none."""
    best = dict.fromkeys(candidates, 0.0)
    for _ in range(NUM_SEARCH_TRIES):
        for name, run in candidates.items():
            best[name] = max(best[name], work / _seconds(run))
    if not best:
        raise ValueError("nothing to compare")
    ordered = tuple(sorted(best.items(), key=lambda item: -item[1]))
    return Ceiling(*ordered[0], ordered)


class ReadProbe:
    """Reads `num_bytes` of huge-page memory once, on the calling thread. `huge_fraction`: how much of it is."""

    def __init__(self, num_bytes: int = READ_BYTES) -> None:
        self._memory = huge_empty((num_bytes,), torch.uint8).zero_()  # the same kind of memory as a model's weights
        self.huge_fraction = huge_fraction([self._memory])
        self._num_bytes = num_bytes
        self._candidates = self._make_candidates()
        self.ceiling = find_ceiling(self._candidates, num_bytes)

    def __call__(self) -> float:
        """Bytes a second."""
        return self._num_bytes / _best_seconds(self._candidates[self.ceiling.name])

    def _make_candidates(self) -> dict[str, Callable[[], object]]:
        floats = self._memory.view(torch.float32)
        candidates: dict[str, Callable[[], object]] = {"torch.sum": floats.sum, "memchr": self._memchr()}
        for width in (4096, 16384, 65536):
            table, vector = floats.view(-1, width), torch.zeros(width)
            candidates[f"torch.mv, rows of {width}"] = _bind(torch.mv, table, vector)
            candidates[f"numpy.dot, rows of {width}"] = _bind(np.dot, table.numpy(), vector.numpy())
        return candidates

    def _memchr(self) -> Callable[[], object]:
        """The C library's search for a byte that does not occur."""
        search = ctypes.CDLL(None).memchr
        search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
        return _bind(search, self._memory.data_ptr(), 1, self._num_bytes)


class GemmProbe:
    """Multiplies two matrices that fit the caches, in the dtype in which this core is fastest.

    `by_dtype`: the ceiling of each dtype in the comparison; the probe uses the best of them.
    """

    def __init__(self, shape: tuple[int, int, int] = _GEMM_SHAPE) -> None:
        rows, inner, columns = shape
        self._flops = 2.0 * rows * inner * columns
        generator = torch.Generator().manual_seed(0)
        left, right = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
        candidates = {dtype: _gemms(left.to(dtype), right.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
        self.by_dtype = {
            str(dtype).removeprefix("torch."): find_ceiling(of_dtype, self._flops)
            for dtype, of_dtype in candidates.items()
        }
        self.dtype = max(self.by_dtype, key=lambda name: self.by_dtype[name].speed)
        self._run = candidates[getattr(torch, self.dtype)][self.by_dtype[self.dtype].name]

    def __call__(self) -> float:
        """Operations a second."""
        return self._flops / _best_seconds(self._run)


def _gemms(left: torch.Tensor, right: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Products [rows, inner] x [columns, inner] by torch, numpy, and oneDNN with packed weights where available."""
    candidates: dict[str, Callable[[], object]] = {
        "torch.mm": _bind(torch.mm, left, right.t()),
        "linear": _bind(linear, left, right),
    }
    if left.dtype == torch.float32:
        candidates["numpy.dot"] = _bind(np.dot, left.numpy(), right.numpy().T)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(right, _PACK_HINT)
        torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return candidates  # not in this build of torch, or not in this dtype on this CPU
    candidates["oneDNN, packed"] = _bind(torch.ops.mkldnn._linear_pointwise, left, packed, None, "none", [], "")
    return candidates


def _bind(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _seconds(run: Callable[[], object]) -> float:
    began_s = time.thread_time()
    run()
    return time.thread_time() - began_s


def _best_seconds(run: Callable[[], object]) -> float:
    return min(_seconds(run) for _ in range(NUM_TRIES))
