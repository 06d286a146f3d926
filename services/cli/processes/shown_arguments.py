"""The name and arguments that `ps` shows of this process. Called by the fork server, whose forks run a command each.

Linux only.

The kernel shows the memory that a program was started with its arguments in. It takes another place for it (since Linux
3.18, where it was built for checkpoints), so that a process which was started with few can show many.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

_PR_SET_NAME = 15
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PLACES = {
    "start_code": 23,
    "end_code": 24,
    "start_data": 42,
    "end_data": 43,
    "start_brk": 44,
    "start_stack": 25,
    "arg_start": 45,
    "arg_end": 46,
    "env_start": 47,
    "env_end": 48,
}
"""Fields of `struct prctl_mm_map`, and their places in `/proc/self/stat`, counted behind the name."""
_FIELDS = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end"),
)
_NO_FILE = 2**32 - 1

_areas: list[mmap.mmap] = []
"""Memory of arguments; mapped until the end of the process and of its forks."""


class _AddressTable(ctypes.Structure):
    """`struct prctl_mm_map`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _FIELDS),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def make_room(num_bytes: int) -> None:
    """Gives this process and its forks so many bytes for `set_arguments`. No effect where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    found = _addresses()
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found["arg_start"] = ctypes.addressof(ctypes.c_char.from_buffer(area))
    found["arg_end"] = found["arg_start"] + num_bytes
    wanted = _AddressTable(**found, brk=libc.sbrk(0), exe_fd=_NO_FILE)
    refused = libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
    if not refused:
        _areas.append(area)


def set_arguments(words: Sequence[str]) -> None:
    """Has `ps` show `words`, as far as there is room for them, and `pkill` find the name of a program started so."""
    program = os.path.basename(os.fsencode(words[0]))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(program), 0, 0, 0)  # its first 15 bytes
    found = _addresses()
    first, room = found["arg_start"], found["arg_end"] - found["arg_start"]
    if room > 0:
        ctypes.memmove(first, b"\0".join(map(os.fsencode, words))[: room - 1].ljust(room, b"\0"), room)


def _addresses() -> dict[str, int]:
    """Those of this process, as the kernel has them."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        numbers = file.read().rpartition(")")[2].split()
    return {name: int(numbers[place]) for name, place in _PLACES.items()}
