"""The other workers whose cached pages a prefill worker reads: its links, its transfer thread and its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from baton.domain.ids import Incarnation
from baton.domain.worker import LinkRecord, WorkerRole
from baton.engine.build import Engine
from baton.engine.mailbox import Mailbox
from baton.kv.geometry import leading_parts_of
from baton.rpc.channel_pool import ChannelPool
from baton.services.prefill.commands import PrefillCommand
from baton.services.prefill.settings import PrefillSettings
from baton.settings.model_source import model_name
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.factory import make_pullers, usable_transports
from baton.worker.handoff.export_client import ExportClient
from baton.worker.handoff.link_sessions import open_link_sessions
from baton.worker.handoff.links import LINK_GRACE_TTLS, LinkIdentity, PeerLinks
from baton.worker.handoff.session_or_call import PeerClients
from baton.worker.lifecycle import WorkerContext

PAGE_ROLES = frozenset({WorkerRole.PREFILL, WorkerRole.DECODE})


class PeerReader:
    """Reads of one prefill worker into its pool. Made in the asyncio loop; `context.stack` closes it."""

    def __init__(
        self,
        settings: PrefillSettings,
        engine: Engine,
        context: WorkerContext,
        incarnation: Incarnation,
        mailbox: Mailbox[PrefillCommand],
        on_change: Callable[[], None],
    ) -> None:
        """Calls `on_change` when a link is up or down. Raises `LinkBroken` if a transport cannot start."""
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox
        transports, memory = usable_transports(settings.transport.value), engine.memory
        puller = make_pullers(transports, context.worker_id, incarnation, memory, self._pulled, context.trust)
        context.stack.callback(puller.close)
        self._submit = puller.submit
        channels = ChannelPool(context.trust)
        context.stack.push_async_callback(channels.close)
        identity = LinkIdentity(
            context.worker_id, incarnation, model_name(settings.model), engine.fingerprint, memory.page_bytes,
            LINK_GRACE_TTLS * settings.worker_ttl_s, PAGE_ROLES, optional=True,
            num_leading_parts=leading_parts_of(engine.geometry),
            has_window_slots=engine.cache.pool.windows is not None,
        )  # fmt: skip
        sessions = open_link_sessions(
            settings.link_sessions, context.worker_id, incarnation, context.trust, context.stack
        )
        self.links = PeerLinks(identity, context.store, PeerClients(channels, sessions), puller, mailbox, on_change)
        self.client = ExportClient(self.links, mailbox, settings.renew_interval_s, len(memory.part_ends))

    def records(self) -> tuple[LinkRecord, ...]:
        """Links for this worker's record."""
        return self.links.records()

    def submit(self, pull: Pull) -> None:
        """Starts a read, from any thread."""
        self._submit(pull)

    def tasks(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What runs beside the server until the worker stops."""
        return self.links.run(), self.client.renew_forever()

    async def close(self) -> None:
        """Delivers the last commits and aborts, and drops the links."""
        await self.client.close()
        self.links.close()

    def _pulled(self, event: PullEvent) -> None:
        """Called from the transfer thread."""
        if event.outcome is not PullOutcome.LATE:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                self._loop.call_soon_threadsafe(self.links.observe_pull, event.pull.source, event)
        self._mailbox.put(event)
