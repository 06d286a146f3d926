"""Maps a file shared and read-only, at an address where the kernel can use huge pages.

Python's `mmap` promises no alignment, so the address is reserved first. The mapping lives as long as its tensors.
A write to it ends the process with a segmentation fault: no worker can change the weights of another.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.memory import HUGE_PAGE_BYTES

ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


def map_file(file: int, num_bytes: int) -> torch.Tensor:
    """The first `num_bytes` of the open `file` as a uint8 tensor that shares them. Raises `OSError`."""
    size = ceil_div(num_bytes, mmap.PAGESIZE) * mmap.PAGESIZE
    reserved_bytes = size + HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _mmap(None, reserved_bytes, 0, flags, -1)
    address = reserved + -reserved % HUGE_PAGE_BYTES
    try:
        _mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file)
    except OSError:
        _libc().munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(reserved_bytes))
        raise
    if ADVICE is not None:  # refused by kernels without huge pages: small ones serve, and are measured as such
        _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ADVICE)
    content = (ctypes.c_ubyte * num_bytes).from_address(address)
    unmap = weakref.finalize(content, _unmap, reserved, reserved_bytes)
    unmap.atexit = False  # a thread may still read the weights then
    return torch.frombuffer(content, dtype=torch.uint8)  # keeps `content`


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, file: int) -> int:
    function = _libc().mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    result = function(address, num_bytes, protection, flags, file, 0)
    if result is None or result == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def _unmap(address: int, num_bytes: int) -> None:
    _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
