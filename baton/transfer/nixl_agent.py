"""Typed wrapper of the NIXL library, which only this module loads. Its errors become `LinkBroken`.

Called by `baton.transfer.nixl`; files have `baton.transfer.file_tier.posix_agent`. An agent has no locks: one thread
owns it. Assumptions about NIXL and UCX were measured with 1.5.1 on CPUs; see `docs/adr`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.domain.errors import LinkBroken
from baton.settings.ucx import open_report, prepare_environment, read_report
from baton.transfer.base import MemoryRegion
from baton.transfer.ucx_report import MAX_REPORT_BYTES, read_transport

PROGRESS_DELAY_US = 1000
_BACKEND = "UCX"
_LOCAL = "NIXL_INIT_AGENT"
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_config_lock = threading.Lock()


Items = NDArray[np.int32]
"""Positions in a prepared list."""


class ReadState(enum.Enum):
    """State of a posted read. Only `DONE` and `DISCONNECTED` prove that no byte can arrive any more."""

    IN_PROGRESS = "moving"
    DONE = "done"
    DISCONNECTED = "disconnected"
    UNKNOWN = "unproven"


def load_nixl() -> Any:
    """NIXL's Python API module: of the build for torch's CUDA version, else of any installed build.

    Raises `ImportError`. Imported on first use, because UCX reads its environment then.
    """
    prepare_environment({})
    open_report()
    torch = sys.modules.get("torch")
    cuda_13 = torch is not None and str(torch.version.cuda).startswith("13")
    problems: list[str] = []
    for package in reversed(_PACKAGES) if cuda_13 else _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            problems.append(f"{package}: {error}")
    raise ImportError("; ".join(problems))


def nixl_available() -> str | None:
    """None if NIXL can be loaded, else the reason."""
    try:
        load_nixl()
    except ImportError as error:
        return str(error)
    return None


class NixlAgent:
    """An agent with a UCX backend. Raises the library's errors as `LinkBroken`."""

    def __init__(self, name: str, *, progress_thread: bool) -> None:
        """`progress_thread`: needed if peers read from this process; a puller polls instead.

        Raises `LinkBroken` if UCX cannot start.
        """
        self.name = name
        self._api = load_nixl()
        self._errors: tuple[type[Exception], ...] = error_types(self._api.nixlBind)
        self._disconnect_error: type[Exception] = self._api.nixlBind.nixlRemoteDisconnectError
        with self._as_link_broken(f"UCX does not start, which --transport stream does without: no NIXL agent {name}"):
            config = self._api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
            with _slow_progress_thread(self._api.nixlBind):
                self._agent: Any = self._api.nixl_agent(name, config)
            # "peer" detects a dead process. With "none" UCX may wait for it for ever.
            self._agent.create_backend(_BACKEND, {"ucx_error_handling_mode": "peer"})

    def register(self, region: MemoryRegion) -> None:
        """Makes memory readable by peers and usable as a destination. It must stay mapped while the process runs."""
        with self._as_link_broken(f"{region.num_bytes} bytes of {region.kind.value} cannot be registered"):
            descriptor = (region.address, region.num_bytes, region.device_id, "")
            self._agent.register_memory([descriptor], region.kind.value, [_BACKEND])

    def metadata(self) -> bytes:
        """Name, UCX address and registered memory of this agent, for peers."""
        with self._as_link_broken("no agent metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Adds a peer and returns its name. Adding it again with the same metadata changes nothing."""
        with self._as_link_broken("peer metadata refused"):
            name = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Removes a peer. Call it only without reads: it would hide their end, not stop them."""
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(name)

    def local_pages(self, region: MemoryRegion, num_bytes: int) -> Any:
        """Prepared list of the first `num_bytes` of each of this process's pages."""
        return self._prepare(_LOCAL, region, num_bytes)

    def remote_pages(self, peer: str, region: MemoryRegion, num_bytes: int) -> Any:
        """Prepared list of the first `num_bytes` of a peer's pages. Fails for memory that it has not registered."""
        return self._prepare(peer, region, num_bytes)

    def local_parts(self, regions: Sequence[MemoryRegion]) -> Any:
        """Prepared list of the whole items of several of this process's regions, one region after another."""
        return self._prepare_rows(_LOCAL, regions)

    def remote_parts(self, peer: str, regions: Sequence[MemoryRegion]) -> Any:
        """Prepared list of the whole items of several of a peer's regions, one region after another."""
        return self._prepare_rows(peer, regions)

    def read(self, local: Any, local_pages: Items, remote: Any, remote_pages: Items) -> Any:
        """Prepares a read of `remote_pages` into `local_pages`, pairwise; `post` starts it. Both [num_items]."""
        with self._as_link_broken("read refused"):
            return self._agent.make_prepped_xfer("READ", local, local_pages, remote, remote_pages)

    def post(self, read: Any) -> ReadState:
        """Starts a read. Over CMA (same host) this call copies all bytes."""
        return self._state(self._agent.transfer, read)

    def poll(self, read: Any) -> ReadState:
        """State of a read. Polling also drives its progress."""
        return self._state(self._agent.check_xfer_state, read)

    def transport(self) -> str | None:
        """The transport of reads, from UCX's own report; None if it is not known."""
        return read_transport(read_report(MAX_REPORT_BYTES))

    def release(self, handle: Any) -> None:
        """Frees a read or a prepared list. Does *not* cancel a read that is moving."""
        with contextlib.suppress(*self._errors):
            handle.release()

    def close(self) -> None:
        """Drops the agent; peers that read from it see a disconnect. Release all its handles first."""
        self._agent = None

    def _prepare(self, owner: str, region: MemoryRegion, num_bytes: int) -> Any:
        return self._prepare_rows(owner, [replace(region, item_bytes=num_bytes)])

    def _prepare_rows(self, owner: str, regions: Sequence[MemoryRegion]) -> Any:
        # One strided row (address, length, device, stride, count) a region, for any number of pages.
        rows = [[one.address, one.num_item_bytes, one.device_id, one.page_bytes, one.num_pages] for one in regions]
        with self._as_link_broken(f"{owner}: pages cannot be addressed"):
            return self._agent.prep_xfer_dlist(owner, np.array(rows, np.uint64), regions[0].kind.value, [_BACKEND])

    def _state(self, ask: Callable[[Any], str], read: Any) -> ReadState:
        try:
            state = ask(read)
        except self._disconnect_error:
            return ReadState.DISCONNECTED
        except self._errors:
            return ReadState.UNKNOWN
        return {"DONE": ReadState.DONE, "PROC": ReadState.IN_PROGRESS}.get(state, ReadState.UNKNOWN)

    @contextlib.contextmanager
    def _as_link_broken(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise LinkBroken(f"{what}: {type(error).__name__}: {error}") from error


def error_types(bindings: Any) -> tuple[type[Exception], ...]:
    """Exceptions of the library, which have no common base class."""
    members = (getattr(bindings, name) for name in dir(bindings))
    return tuple(member for member in members if isinstance(member, type) and issubclass(member, Exception))


@contextlib.contextmanager
def _slow_progress_thread(bindings: Any) -> Iterator[None]:
    """Sets the progress delay to 1 ms: 2 % of a core and no latency. The API hard-codes 0, which burns a core."""
    original: Any = bindings.nixlAgentConfig

    def set_delay(config: object, name: str, value: object) -> None:
        original.__setattr__(config, name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    slowed = type("SlowProgressConfig", (original,), {"__setattr__": set_delay})
    with _config_lock:
        bindings.nixlAgentConfig = slowed
        try:
            yield
        finally:
            bindings.nixlAgentConfig = original
