"""Tells whether a worker tags or verifies pages, from its settings, credentials, transports and kind of memory."""

from __future__ import annotations

from collections.abc import Collection

from baton.domain.trust import ClusterTrust
from baton.kv.memory import MemoryKind
from baton.settings.base import SettingsError
from baton.settings.choices import PageTagKind
from baton.settings.groups import WorkerSettings
from baton.transfer import stream


def uses_tags(settings: WorkerSettings, trust: ClusterTrust, transports: Collection[str], memory: MemoryKind) -> bool:
    """True if pages need tags. Raises `SettingsError` for `page_tags=on` without a secret or without digests."""
    possible = trust.secret is not None and settings.digests
    if settings.page_tags is PageTagKind.ON and not possible:
        raise SettingsError(
            "page_tags is on",
            why="tags need a cluster secret and digests",
            hint="Set cluster_secret_file and leave digests on, or use page_tags=auto",
        )
    if settings.page_tags is not PageTagKind.AUTO:
        return settings.page_tags is PageTagKind.ON
    in_clear = trust.tls is None or any(name != stream.TRANSPORT for name in transports)
    return possible and in_clear and memory is MemoryKind.DRAM
