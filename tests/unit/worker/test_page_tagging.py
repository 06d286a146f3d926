"""When pages are tagged: with a secret, host memory and bytes in clear, or as set."""

from __future__ import annotations

import pytest

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust, TlsIdentity
from baton.kv.memory import MemoryKind
from baton.services.prefill.settings import PrefillSettings
from baton.settings.base import SettingsError
from baton.settings.choices import PageTagKind
from baton.settings.groups import WorkerSettings
from baton.worker.page_tagging import uses_tags

SECRET = ClusterTrust(b"s" * 32)
TLS = ClusterTrust(b"s" * 32, TlsIdentity(b"", b"", b""))


def settings(kind: PageTagKind = PageTagKind.AUTO, digests: bool = True) -> WorkerSettings:
    return PrefillSettings(page_tags=kind, digests=digests)


@pytest.mark.parametrize(
    ("trust", "transports", "memory", "tagged"),
    [
        (SECRET, ["nixl"], MemoryKind.DRAM, True),
        (SECRET, ["stream"], MemoryKind.DRAM, True),
        (TLS, ["nixl", "stream"], MemoryKind.DRAM, True),
        (TLS, ["stream"], MemoryKind.DRAM, False),
        (OPEN_CLUSTER, ["nixl"], MemoryKind.DRAM, False),
        (SECRET, ["nixl"], MemoryKind.VRAM, False),
    ],
)
def test_auto_tags_pages_that_travel_in_clear(trust, transports, memory, tagged):
    assert uses_tags(settings(), trust, transports, memory) is tagged


def test_on_and_off_are_obeyed():
    assert uses_tags(settings(PageTagKind.ON), TLS, ["stream"], MemoryKind.VRAM)
    assert not uses_tags(settings(PageTagKind.OFF), SECRET, ["nixl"], MemoryKind.DRAM)
    assert not uses_tags(settings(digests=False), SECRET, ["nixl"], MemoryKind.DRAM)


@pytest.mark.parametrize(("trust", "digests"), [(OPEN_CLUSTER, True), (SECRET, False)])
def test_on_needs_a_secret_and_digests(trust, digests):
    with pytest.raises(SettingsError, match="secret and digests"):
        uses_tags(settings(PageTagKind.ON, digests), trust, ["nixl"], MemoryKind.DRAM)
