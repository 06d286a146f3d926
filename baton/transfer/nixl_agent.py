"""The one door to the NIXL library: finds it, tames it, and gives its agent types, enums and one kind of error.

Called by `baton.transfer.nixl`. Knows no pulls and no links. An agent has no locks: one thread owns it.
What is assumed of NIXL and UCX here was measured with 1.5.1, on CPUs: see `docs/adr`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from baton.domain.errors import LinkBroken
from baton.settings.ucx import prepare_environment
from baton.transfer.region import MemoryRegion

PROGRESS_DELAY_US = 1000
_BACKEND = "UCX"
_LOCAL = "NIXL_INIT_AGENT"
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_config_lock = threading.Lock()


class ReadState(enum.Enum):
    """A posted read. Only `DONE` and `DISCONNECTED` prove that no byte can land any more."""

    IN_PROGRESS = "moving"
    DONE = "done"
    DISCONNECTED = "disconnected"
    UNKNOWN = "unproven"


def load_nixl() -> Any:
    """NIXL's Python API module, of the build that suits the CUDA that torch was built for, else of any installed one.

    Raises `ImportError`. Imported on first use, because UCX reads its environment only then.
    """
    prepare_environment({})
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
    """None where NIXL can be loaded, else why not."""
    try:
        load_nixl()
    except ImportError as error:
        return str(error)
    return None


class NixlAgent:
    """One agent with a UCX backend. Every error of the library, and only those, leaves as `LinkBroken`."""

    def __init__(self, name: str, *, progress_thread: bool) -> None:
        """`progress_thread`: needed where peers read from this process; a puller polls instead.

        Raises `LinkBroken` when UCX cannot start.
        """
        self.name = name
        self._api = load_nixl()
        self._errors: tuple[type[Exception], ...] = _error_types(self._api.nixlBind)
        self._disconnect_error: type[Exception] = self._api.nixlBind.nixlRemoteDisconnectError
        with self._as_link_broken(f"no NIXL agent {name}"):
            config = self._api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
            with _slow_progress_thread(self._api.nixlBind):
                self._agent: Any = self._api.nixl_agent(name, config)
            # "peer": a dead process is noticed. With "none" UCX may wait for it for ever.
            self._agent.create_backend(_BACKEND, {"ucx_error_handling_mode": "peer"})

    def register(self, region: MemoryRegion) -> None:
        """Makes memory readable by peers and usable as a destination. It must stay mapped while the process lives."""
        with self._as_link_broken(f"{region.num_bytes} bytes of {region.kind.value} cannot be registered"):
            descriptor = (region.address, region.num_bytes, region.device_id, "")
            self._agent.register_memory([descriptor], region.kind.value, [_BACKEND])

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent: its name, its UCX address and its registered memory."""
        with self._as_link_broken("no agent metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name. Adding one that is known with the same metadata changes nothing."""
        with self._as_link_broken("peer metadata refused"):
            name = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forgets a peer. Does not stop its reads, only hides their end: to be called when there are none."""
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(name)

    def local_pages(self, region: MemoryRegion) -> Any:
        """A prepared list of this process's own pages."""
        return self._prepare(_LOCAL, region)

    def remote_pages(self, peer: str, region: MemoryRegion) -> Any:
        """A prepared list of a peer's pages. Fails for memory that the peer has not registered."""
        return self._prepare(peer, region)

    def read(self, local: Any, local_pages: Sequence[int], remote: Any, remote_pages: Sequence[int]) -> Any:
        """A read of `remote_pages` into `local_pages`, pairwise; nothing moves before `post`."""
        with self._as_link_broken("read refused"):
            return self._agent.make_prepped_xfer(
                "READ", local, np.asarray(local_pages, np.int32), remote, np.asarray(remote_pages, np.int32)
            )

    def post(self, read: Any) -> ReadState:
        """Starts a read. Over CMA (same host) all bytes are copied in here, on this thread."""
        return self._state(self._agent.transfer, read)

    def poll(self, read: Any) -> ReadState:
        """Asks for a read's state; this is also what moves it along."""
        return self._state(self._agent.check_xfer_state, read)

    def release(self, handle: Any) -> None:
        """Frees a read or a prepared list. Does *not* cancel a read that is moving."""
        with contextlib.suppress(*self._errors):
            handle.release()

    def close(self) -> None:
        """Drops the agent; peers that read from it see a disconnect. All its handles must have been released."""
        self._agent = None

    def _prepare(self, owner: str, region: MemoryRegion) -> Any:
        # One strided row (address, length, device, stride, count), however many pages there are.
        row = [region.address, region.page_bytes, region.device_id, region.page_bytes, region.num_pages]
        with self._as_link_broken(f"{owner}: pages cannot be addressed"):
            return self._agent.prep_xfer_dlist(owner, np.array([row], np.uint64), region.kind.value, [_BACKEND])

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


def _error_types(bindings: Any) -> tuple[type[Exception], ...]:
    """The library's exceptions; they have no base class of their own."""
    members = (getattr(bindings, name) for name in dir(bindings))
    return tuple(member for member in members if isinstance(member, type) and issubclass(member, Exception))


@contextlib.contextmanager
def _slow_progress_thread(bindings: Any) -> Iterator[None]:
    """The Python API hard-codes a progress delay of 0, which burns a core; 1 ms costs 2 % and no latency."""
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
