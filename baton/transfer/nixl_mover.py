"""Mover of NIXL: links, posted reads and late reads of one puller. Owns its agent; runs in the transfer thread.

A read cannot be cancelled: releasing its handle does not stop late bytes. So a read past its deadline is polled until
it is done or its peer is gone; then its pull ends. A hanging peer causes no error; deadlines and heartbeats detect it.
A pull's life: start -> posts of at most 16 MiB -> digests of each finished post -> `complete`, or `fail` once nothing
of it moves any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog

from baton.domain.errors import LinkBroken
from baton.domain.ids import WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PoolMemory
from baton.kv.page_tags import TagVerifier
from baton.kv.windows.memory import WindowedMemory
from baton.transfer.active_pull import ActivePull, pull_problem
from baton.transfer.base import MemoryRegion, Pull, SourceInfo, region_of, window_region_of
from baton.transfer.digest import wrong_positions
from baton.transfer.nixl_agent import Items, NixlAgent, ReadState
from baton.transfer.nixl_metadata import NixlMetadata, agent_name, decode_metadata

MAX_POST_BYTES = 16 * 1024 * 1024
"""Over CMA a post blocks the transfer thread while it copies."""
MAX_POSTS_PER_LINK = 4
MIN_POLL_S = 0.0001
MAX_POLL_S = 0.0005
LATE_POLL_S = 0.01
CLOSE_DRAIN_S = 1.0
PATH = "nixl/ucx ({})"
UNKNOWN_PATH = PATH.format("unknown")
TCP_PATH = PATH.format("tcp")
"""UCX may abort a source when a reader of it is killed: docs/results/killed-peers.md."""

_HALVES = 0
"""Key of the prepared lists of pages and their window parts."""
_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Link:
    """One incarnation of one source. `num_reads` posts and `num_active_pulls` pulls still use it."""

    info: SourceInfo
    peer: str
    region: MemoryRegion
    windows: MemoryRegion | None
    pages: dict[int, Any]  # prepared lists, by the bytes that they have of a page; `_HALVES`: of both halves
    num_reads: int = 0
    num_active_pulls: int = 0
    broken: str | None = None
    has_path: bool = False


@dataclass(slots=True, eq=False)
class _Transfer:
    """A pull on its link. Positions [0, next_position) are posted; `num_reads` posts are moving.

    `failure`: reason why a post failed or could not be made.
    """

    active: ActivePull
    link: _Link
    next_position: int = 0
    num_reads: int = 0
    corrupt: list[int] = field(default_factory=list)
    failure: str | None = None

    @property
    def stopped(self) -> bool:
        """True if nothing more is posted for this pull."""
        return self.active.late or self.failure is not None or self.link.broken is not None

    @property
    def has_unposted(self) -> bool:
        return self.next_position < len(self.active.pull.local_pages)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One post: positions [start, stop) of a pull."""

    transfer: _Transfer
    handle: Any
    start: int
    stop: int


class NixlMover:
    """See `baton.transfer.puller.Mover`."""

    def __init__(
        self,
        agent: NixlAgent,
        memory: PoolMemory,
        paths: dict[WorkerId, str],
        trust: ClusterTrust = OPEN_CLUSTER,
    ) -> None:
        """`paths` gets the path of each source's bytes, for the puller to read."""
        self._trust = trust
        self._verifier = TagVerifier(trust)
        self._memory = memory
        self._region, self._windows = region_of(memory), window_region_of(memory)
        self._paths = paths
        self._agent = agent
        for region in (self._region, self._windows):
            if region is not None:
                self._agent.register(region)
        page_bytes = self._region.page_bytes
        self._pages = {page_bytes: self._agent.local_pages(self._region, page_bytes)}  # as those of a link
        self._links: dict[WorkerId, _Link] = {}
        self._retired: list[_Link] = []
        self._transfers: list[_Transfer] = []
        self._reads: list[_Read] = []
        self._poll_s = MIN_POLL_S

    # ------------------------------------------------------------------ links

    def link(self, source: SourceInfo) -> None:
        metadata = decode_metadata(source, self._trust)
        self.unlink(source.worker_id)
        in_use = next((link for link in self._retired if link.info == source and link.broken is None), None)
        if in_use is not None:  # still valid, and NIXL refuses to add a peer twice
            self._retired.remove(in_use)
            in_use.has_path = False  # `unlink` has forgotten it
        self._links[source.worker_id] = in_use or self._open(source, metadata)

    def unlink(self, source: WorkerId) -> None:
        """Retires a link until its last read has ended: removing the peer would hide the end of moving reads."""
        self._paths.pop(source, None)
        link = self._links.pop(source, None)
        if link is not None:
            self._retired.append(link)
            self._drop_drained()

    def _open(self, source: SourceInfo, metadata: NixlMetadata) -> _Link:
        expected = agent_name("source", source.worker_id, source.incarnation)
        if any(link.peer == expected for link in self._retired):
            raise LinkBroken(f"{source.worker_id}: reads of a broken link to this incarnation have not ended")
        peer = self._agent.add_peer(metadata.agent)
        try:
            if peer != expected:
                raise LinkBroken(f"{source.worker_id}: metadata of agent {peer}, not of {expected}")
            region = MemoryRegion(
                source.base_address, source.num_pages, source.page_bytes, metadata.device_id, metadata.kind
            )
            windows = None
            if source.window_bytes:
                windows = replace(
                    region,
                    address=source.window_base_address,
                    num_pages=source.num_window_slots,
                    page_bytes=source.window_bytes,
                )
            pages = {region.page_bytes: self._agent.remote_pages(peer, region, region.page_bytes)}
            return _Link(source, peer, region, windows, pages)
        except LinkBroken:
            self._agent.remove_peer(peer)
            raise

    def _drop_drained(self) -> None:
        for link in [link for link in self._retired if link.num_active_pulls == 0]:
            self._retired.remove(link)
            self._remove(link)

    def _remove(self, link: _Link) -> None:
        for pages in link.pages.values():
            self._agent.release(pages)
        self._agent.remove_peer(link.peer)

    def _break(self, link: _Link, reason: str) -> None:
        """Marks a link as unusable. A new `link` with new metadata replaces it."""
        if link.broken is None:
            link.broken = reason
            _log.warning("link broken", source=link.info.worker_id, incarnation=link.info.incarnation, reason=reason)
        if self._links.get(link.info.worker_id) is link:
            self.unlink(link.info.worker_id)

    # ------------------------------------------------------------------ pulls

    def start(self, active: ActivePull) -> None:
        link = self._links.get(active.pull.source)
        if link is None:
            active.fail(f"no link to {active.pull.source}")
        elif reason := pull_problem(active.pull, self._region.num_pages, link.info):
            active.fail(reason)
        else:
            link.num_active_pulls += 1
            self._transfers.append(_Transfer(active, link))
            self._poll_s = MIN_POLL_S

    def progress(self) -> float | None:
        moved = self._poll_all()
        moved = self._post_next() or moved
        self._end_finished()
        if any(self._may_post(transfer) for transfer in self._transfers):
            return 0.0
        if not self._reads:
            return None
        self._poll_s = MIN_POLL_S if moved else min(2 * self._poll_s, MAX_POLL_S)
        return LATE_POLL_S if all(read.transfer.active.late for read in self._reads) else self._poll_s

    def close(self) -> None:
        """Waits up to `CLOSE_DRAIN_S` for moving reads: UCX aborts a TCP source whose reader is gone.

        A source that stands still for longer may be aborted; its supervisor restarts it.
        """
        self._drain(CLOSE_DRAIN_S)
        for read in self._reads:
            self._agent.release(read.handle)
        for link in [*self._links.values(), *self._retired]:
            self._remove(link)
        for pages in self._pages.values():
            self._agent.release(pages)
        # Handles keep the agent alive, and a traceback may keep this mover.
        self._reads, self._transfers, self._retired, self._pages = [], [], [], {}
        self._links.clear()
        self._agent.close()

    def _drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        moving = self._reads
        while moving and time.monotonic() < deadline:
            moving = [read for read in moving if self._agent.poll(read.handle) is ReadState.IN_PROGRESS]
            pause.wait(MIN_POLL_S if moving else 0.0)

    def _poll_all(self) -> bool:
        """Polls every read; True if one ended."""
        still = [read for read in self._reads if not self._finish_read(read, self._agent.poll(read.handle))]
        moved = len(still) < len(self._reads)
        self._reads = still
        return moved

    def _may_post(self, transfer: _Transfer) -> bool:
        return transfer.has_unposted and not transfer.stopped and transfer.link.num_reads < MAX_POSTS_PER_LINK

    def _post_next(self) -> bool:
        """Makes one post, as it may block while it copies. Pulls take turns, so that short ones get through."""
        transfer = next((transfer for transfer in self._transfers if self._may_post(transfer)), None)
        if transfer is None:
            return False
        self._transfers.remove(transfer)
        self._transfers.append(transfer)
        self._post(transfer)
        return True

    def _post(self, transfer: _Transfer) -> None:
        pull, start = transfer.active.pull, transfer.next_position
        num_bytes = pull.page_bytes(self._memory)
        stop = min(start + max(1, MAX_POST_BYTES // num_bytes), len(pull.local_pages))
        try:
            handle = self._read(transfer.link, pull, slice(start, stop))
        except LinkBroken as error:
            transfer.failure = str(error)
            self._break(transfer.link, transfer.failure)
            return
        transfer.next_position = stop
        transfer.num_reads += 1
        transfer.link.num_reads += 1
        read = _Read(transfer, handle, start, stop)
        state = self._agent.post(handle)
        if not self._finish_read(read, state):
            self._reads.append(read)

    def _read(self, link: _Link, pull: Pull, part: slice) -> Any:
        """A read of some pages of a pull. Raises `LinkBroken`."""
        local_pages, remote_pages = pull.local_pages[part], pull.remote_pages[part]
        if pull.num_parts is not None or (self._windows is None and link.windows is None):
            local, remote = self._prepared(link, pull.page_bytes(self._memory))
            items = _by_address(local_pages, remote_pages)
            return self._agent.read(local, items[0], remote, items[1])
        local, remote = self._prepared_halves(link)
        slots = self._memory.slot_of if isinstance(self._memory, WindowedMemory) else range(self._region.num_pages)
        ours = [slots[page] for page in local_pages]
        theirs = pull.remote_windows[part] if link.windows is not None else remote_pages
        if len(theirs) != len(remote_pages) or min(ours) < 0 or min(theirs) < 0:
            raise LinkBroken(f"{link.info.worker_id}: window parts are to be read that have no slots")
        edges = self._region.num_pages, link.region.num_pages
        both = [
            [*pages, *(edge + slot for slot in windows)]
            for pages, windows, edge in zip((local_pages, remote_pages), (ours, theirs), edges, strict=True)
        ]
        items = _by_address(*both)
        return self._agent.read(local, items[0], remote, items[1])

    def _prepared_halves(self, link: _Link) -> tuple[Any, Any]:
        """The prepared lists of pages up to their window parts, and then of these, wherever they lie."""
        edge = self._memory.part_ends[-2]
        if _HALVES not in self._pages:
            self._pages[_HALVES] = self._agent.local_parts(self._region.halves(edge, self._windows))
        if _HALVES not in link.pages:
            link.pages[_HALVES] = self._agent.remote_parts(link.peer, link.region.halves(edge, link.windows))
        return self._pages[_HALVES], link.pages[_HALVES]

    def _prepared(self, link: _Link, num_bytes: int) -> tuple[Any, Any]:
        """The prepared lists of the first `num_bytes` of local and of remote pages."""
        if num_bytes not in self._pages:
            self._pages[num_bytes] = self._agent.local_pages(self._region, num_bytes)
        if num_bytes not in link.pages:
            link.pages[num_bytes] = self._agent.remote_pages(link.peer, link.region, num_bytes)
        return self._pages[num_bytes], link.pages[num_bytes]

    def _finish_read(self, read: _Read, state: ReadState) -> bool:
        """Records the state of a read; True if it ended."""
        transfer = read.transfer
        if state is ReadState.IN_PROGRESS:
            return False
        if state is ReadState.UNKNOWN:  # its bytes may still arrive: keep its pages
            self._break(transfer.link, "NIXL reports an error that proves nothing")
            transfer.active.expire("the read's end cannot be proved")
            return False
        if state is ReadState.DISCONNECTED:
            transfer.failure = "the source is gone"
            self._break(transfer.link, transfer.failure)
        else:
            self._record_read(read)
            self._update_path(transfer.link)
        transfer.num_reads -= 1
        transfer.link.num_reads -= 1
        self._agent.release(read.handle)
        return True

    def _record_read(self, read: _Read) -> None:
        transfer, pull = read.transfer, read.transfer.active.pull
        transfer.active.num_bytes += (read.stop - read.start) * pull.page_bytes(self._memory)
        if not transfer.active.late:
            part, found = slice(read.start, read.stop), transfer.active.found
            transfer.corrupt += wrong_positions(self._memory, pull, part, self._verifier, found)

    def _update_path(self, link: _Link) -> None:
        """Records the path of a link's bytes after its first read: UCX has chosen its protocol then."""
        if not link.has_path:
            link.has_path = True
            transport = self._agent.transport()
            self._paths[link.info.worker_id] = UNKNOWN_PATH if transport is None else PATH.format(transport)

    def _end_finished(self) -> None:
        for transfer in list(self._finished()):
            self._transfers.remove(transfer)
            transfer.link.num_active_pulls -= 1
            if transfer.has_unposted or transfer.failure is not None:
                transfer.active.fail(transfer.failure or transfer.link.broken or "past its deadline")
            else:
                transfer.active.complete(transfer.corrupt)
        self._drop_drained()

    def _finished(self) -> Iterator[_Transfer]:
        return (
            transfer
            for transfer in self._transfers
            if transfer.num_reads == 0 and (transfer.stopped or not transfer.has_unposted)
        )


def _by_address(local: Sequence[int], remote: Sequence[int]) -> tuple[Items, Items]:
    """The same pairs of items in ascending order of the remote ones. Both [num_items].

    NIXL joins neighbours of a list that are neighbours in both memories; every other item costs a call of the kernel.
    Free lists give pages in descending order.
    """
    ours, theirs = np.asarray(local, np.int32), np.asarray(remote, np.int32)
    order = theirs.argsort(kind="stable")
    return ours[order], theirs[order]
