"""Properties of real NIXL: names, idle cost, refusals, and the end of its native threads."""

import os
import sys
import threading
import time
from dataclasses import replace

import pytest

from baton.domain.errors import Broken, LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.settings import ucx
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.digest import digest_pages
from baton.transfer.nixl import NixlPuller, NixlSource
from baton.transfer.nixl_agent import NixlAgent, load_nixl, nixl_available
from baton.transfer.nixl_mover import MAX_POST_BYTES
from tests.staged_memory import staged_memory
from tests.unit.transfer.rigs import EventLog, needs_nixl, page_ids

DECODE, PREFILL = WorkerId("decode-0"), WorkerId("prefill-0")


def test_user_settings_of_the_environment_are_kept(monkeypatch):
    environ = {"UCX_LOG_LEVEL": "info", "UCX_NET_DEVICES": "eth7"}
    monkeypatch.setattr(os, "environ", environ)
    for library in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    ucx.prepare_environment({"UCX_NET_DEVICES": "lo"})
    assert environ == {**ucx.defaults(), "UCX_LOG_LEVEL": "info", "UCX_NET_DEVICES": "lo"}


def test_the_kernel_copies_a_whole_post_at_once():
    assert ucx.DEFAULTS["UCX_CMA_SEG_SIZE"] == f"{MAX_POST_BYTES // (1024 * 1024)}m"


def test_the_environment_cannot_be_changed_after_the_library_was_loaded(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(ucx.defaults()))
    monkeypatch.setitem(sys.modules, "nixl_cu12", sys)
    ucx.prepare_environment({})
    with pytest.raises(Broken, match="UCX_TLS"):
        ucx.prepare_environment({"UCX_TLS": "tcp"})


def test_a_missing_library_is_reported_as_a_reason(monkeypatch):
    monkeypatch.setattr("baton.transfer.nixl_agent._PACKAGES", ("nixl_cu0",))
    assert "nixl_cu0" in (nixl_available() or "")
    with pytest.raises(ImportError, match="nixl_cu0"):
        NixlPuller(DECODE, Incarnation(1), PageMemory(1, 64), EventLog())


@needs_nixl
def test_ucx_that_does_not_start_is_told_with_the_way_around(monkeypatch):
    """As in a container without /sys, where UCX finds no device."""
    api = load_nixl()

    def refuse(*arguments: object) -> None:
        raise api.nixlBind.nixlBackendError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(api.nixl_agent, "create_backend", refuse)
    with pytest.raises(LinkBroken, match=r"--transport stream .*prefill:p:1.*NIXL_ERR_BACKEND"):
        NixlAgent("prefill:p:1", progress_thread=True)


@needs_nixl
def test_patching_the_progress_delay_leaves_the_library_as_it_was():
    bindings = load_nixl().nixlBind
    before = bindings.nixlAgentConfig
    agent = NixlAgent("prefill:p:1", progress_thread=True)
    assert bindings.nixlAgentConfig is before
    agent.close()


@needs_nixl
def test_an_idle_pair_burns_no_core():
    memory = PageMemory(4, 4096)
    source = NixlSource(PREFILL, Incarnation(1), memory)
    puller = NixlPuller(DECODE, Incarnation(2), memory, EventLog())
    try:
        before = time.process_time()
        threading.Event().wait(0.5)
        assert time.process_time() - before < 0.15  # a progress thread without a delay uses 0.4 s and more
    finally:
        puller.close()
        source.close()


@needs_nixl
def test_closing_ends_native_threads_too():
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    memory = PageMemory(4, 4096)
    before = threads()
    source = NixlSource(PREFILL, Incarnation(1), memory)
    puller = NixlPuller(DECODE, Incarnation(2), memory, EventLog())
    started = threads() - before
    assert started
    puller.close()
    source.close()
    source.close()
    deadline = time.monotonic() + 30.0
    while started & threads():  # the kernel lists a joined thread for a moment
        assert time.monotonic() < deadline, f"{len(started & threads())} threads run on"
        os.sched_yield()


@needs_nixl
def test_memory_that_a_source_has_not_registered_is_refused_at_connect():
    memory = PageMemory(4, 4096)
    source = NixlSource(PREFILL, Incarnation(1), memory)
    puller = NixlPuller(DECODE, Incarnation(2), memory, EventLog())
    info = SourceInfo(PREFILL, Incarnation(1), "", "nixl", source.metadata(), memory.address, 4, 4096)
    try:
        with pytest.raises(LinkBroken, match="cannot be addressed"):
            puller.connect(replace(info, num_pages=10_000))
        with pytest.raises(LinkBroken, match="damaged"):
            puller.connect(replace(info, metadata=b"junk"))
        puller.connect(info)
    finally:
        puller.close()
        source.close()


@needs_nixl
def test_pages_behind_staging_copies_are_read_where_they_lie():
    remote, local, events = staged_memory(4, 4096), staged_memory(4, 4096), EventLog()
    remote.write(range(4), [memoryview(os.urandom(4096)) for _ in range(4)])
    source = NixlSource(PREFILL, Incarnation(1), remote)
    puller = NixlPuller(DECODE, Incarnation(2), local, events)
    try:
        puller.connect(SourceInfo(PREFILL, Incarnation(1), "", "nixl", source.metadata(), remote.address, 4, 4096))
        pull = Pull(
            1,
            PREFILL,
            page_ids([0, 1, 2, 3]),
            page_ids([3, 2, 1, 0]),
            digest_pages(remote, page_ids([0, 1, 2, 3])),
            10.0,
        )
        puller.submit(pull)
        assert events.terminal(pull).outcome is PullOutcome.DONE
        assert local.read([3, 2, 1, 0]) == remote.read(range(4))
        assert puller.path(PREFILL).startswith("nixl/ucx (")
    finally:
        puller.close()
        source.close()
