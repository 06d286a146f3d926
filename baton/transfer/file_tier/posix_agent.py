"""A NIXL agent that has only the POSIX plugin: moves pages between a buffer and files.

Measured with NIXL 1.5.1 (ADR 144): the error of a transfer comes once nothing of it moves any more; the plugin's third
engine, POSIX AIO, is not used, as after one error each of its transfers fails.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baton.domain.errors import LinkBroken
from baton.transfer.nixl_agent import error_types, load_nixl

Engines = Sequence[tuple[str, dict[str, str]]]
"""Names and options of engines of the plugin, by preference."""
ENGINES: Engines = (("io_uring", {"use_uring": "true"}), ("Linux AIO", {"use_aio": "true"}))
"""io_uring first: its posts do not wait, so that a late disk is noticed. Docker's profile forbids it. A post of Linux
AIO waits for files that were not opened for direct I/O."""
MAX_BATCH = 64
"""Places of one transfer, which the plugin submits at once."""
IO_DEADLINE_S = 10.0
_SIZES = {"ios_pool_size": "256", "kernel_queue_size": str(MAX_BATCH)}
_BACKEND = "POSIX"
_FIRST_POLL_S, _LAST_POLL_S = 5e-5, 1e-3

_left_behind: list[PosixAgent] = []
"""Closed with a transfer in flight, which may still write into their buffers."""


class PosixAgent:
    """One thread at a time uses it. A place is a file descriptor and an offset.

    A transfer that is late is no longer waited for. Until it has ended, everything else fails at once.
    """

    def __init__(self, name: str, buffer_bytes: int, engines: Engines = ENGINES) -> None:
        """Raises `ImportError` without NIXL, `LinkBroken` if its plugin does not start."""
        api = load_nixl()
        self._errors: tuple[type[Exception], ...] = (*error_types(api.nixlBind), RuntimeError)
        self._name = name
        self._buffer = np.zeros(buffer_bytes, np.uint8)
        self._files: set[int] = set()
        self._late: Any = None
        self._pause = threading.Event()
        self._agent, self.engine = self._start(api, engines)
        try:
            self._register((self._buffer.ctypes.data, buffer_bytes, 0, ""), "DRAM")
        except self._errors as error:
            raise LinkBroken(f"NIXL's POSIX plugin takes no buffer: {type(error).__name__}: {error}") from error

    def add_file(self, fd: int, num_bytes: int) -> None:
        """Registers a file, once. Raises `OSError`."""
        if fd in self._files:
            return
        try:
            self._register((0, num_bytes, fd, ""), "FILE")
        except self._errors as error:
            raise OSError(errno.EIO, f"NIXL takes no file: {type(error).__name__}: {error}") from error
        self._files.add(fd)

    def read(self, places: Sequence[tuple[int, int]], num_bytes: int) -> list[bytearray]:
        """`num_bytes` at each of at most `MAX_BATCH` places. Raises `OSError` if one of them cannot be read whole."""
        self._refuse_while_late()
        self._move("READ", places, num_bytes)
        content = self._buffer.data
        return [bytearray(content[at : at + num_bytes]) for at in range(0, len(places) * num_bytes, num_bytes)]

    def write(self, place: tuple[int, int], page: bytes) -> None:
        """Raises `OSError` if not all of a page was written."""
        self._refuse_while_late()
        self._buffer[: len(page)] = np.frombuffer(page, np.uint8)
        self._move("WRITE", [place], len(page))

    def is_late(self) -> bool:
        """True while a transfer is in flight that is no longer waited for."""
        if self._late is None:
            return False
        late, has_ended = self._late, True
        with contextlib.suppress(OSError):  # its bytes are not needed
            has_ended = self._has_ended(self._agent.check_xfer_state, late)
        if has_ended:
            self._late = None
        return not has_ended

    def close(self) -> bool:
        """False if a transfer is in flight: the agent, its buffer and the files then stay as long as the process."""
        if self.is_late():
            _left_behind.append(self)
            return False
        self._agent = None
        return True

    def _start(self, api: Any, engines: Engines) -> tuple[Any, str]:
        problems: list[str] = []
        for engine, options in engines:
            try:
                agent = api.nixl_agent(self._name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
                agent.create_backend(_BACKEND, {**_SIZES, **options})
            except self._errors as error:
                problems.append(f"{engine}: {type(error).__name__}: {error}")
            else:
                return agent, engine
        raise LinkBroken(f"NIXL's POSIX plugin does not start ({'; '.join(problems)})")

    def _register(self, region: tuple[int, int, int, str], kind: str) -> None:
        self._agent.register_memory([region], kind, [_BACKEND])

    def _move(self, operation: str, places: Sequence[tuple[int, int]], num_bytes: int) -> None:
        """Moves the first bytes of the buffer. Raises `OSError`."""
        base = self._buffer.ctypes.data
        ours = [(base + number * num_bytes, num_bytes, 0) for number in range(len(places))]
        theirs = [(offset, num_bytes, fd) for fd, offset in places]
        try:
            local, remote = self._agent.get_xfer_descs(ours, "DRAM"), self._agent.get_xfer_descs(theirs, "FILE")
            transfer = self._agent.initialize_xfer(operation, local, remote, self._name, backends=[_BACKEND])
        except self._errors as error:
            raise OSError(errno.EIO, f"NIXL refuses a transfer: {type(error).__name__}: {error}") from error
        deadline, poll_s = time.monotonic() + IO_DEADLINE_S, _FIRST_POLL_S
        has_ended = self._has_ended(self._agent.transfer, transfer)
        has_ended = has_ended or self._has_ended(self._agent.check_xfer_state, transfer)  # a post itself tells no end
        while not has_ended:
            if time.monotonic() >= deadline:
                self._late = transfer
                raise OSError(errno.ETIMEDOUT, f"NIXL has not moved a page within {IO_DEADLINE_S} s")
            self._pause.wait(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)
            has_ended = self._has_ended(self._agent.check_xfer_state, transfer)

    def _refuse_while_late(self) -> None:
        if self.is_late():
            raise OSError(errno.ETIMEDOUT, "an earlier transfer of NIXL has not ended")

    def _has_ended(self, ask: Callable[[Any], str], transfer: Any) -> bool:
        """Frees a transfer that has ended. Raises `OSError` if it failed."""
        try:
            state = ask(transfer)
        except self._errors as error:
            self._release(transfer)
            raise OSError(errno.EIO, f"NIXL cannot move a page: {type(error).__name__}: {error}") from error
        if state == "PROC":
            return False
        self._release(transfer)
        if state != "DONE":
            raise OSError(errno.EIO, f"NIXL cannot move a page: {state}")
        return True

    def _release(self, transfer: Any) -> None:
        with contextlib.suppress(*self._errors):
            transfer.release()
