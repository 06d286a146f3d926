"""Opens what `/v1/cluster` shows: the view, its feed, and the exchange with the other routers. Called by `app`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton import __version__
from baton.domain.ids import OwnerId
from baton.services.router.cluster.feed import ClusterFeed
from baton.services.router.cluster.peers.exchange import PeerExchange
from baton.services.router.cluster.view import ClusterView, ViewIdentity
from baton.services.router.cluster_reader import ClusterReader
from baton.services.router.limits import store_options
from baton.services.router.settings import RouterSettings
from baton.services.router.ui.bundle import page_bundle
from baton.settings.model_source import model_name
from baton.settings.trust import read_trust
from baton.store.views.redis_view_store import connect_views
from baton.telemetry.request_traces import RequestTraces


@asynccontextmanager
async def open_feed(
    settings: RouterSettings, reader: ClusterReader, traces: RequestTraces, owner: OwnerId
) -> AsyncIterator[ClusterFeed]:
    """The feed of this router, as `owner`. Raises `SettingsError` for unreadable secrets."""
    build = page_bundle().build if settings.ui else ""
    demo = settings.demo_socket is not None
    identity = ViewIdentity(settings.router_id, settings.public_model_name, __version__, build, demo)
    feed = ClusterFeed(ClusterView(identity, reader, traces))
    trust, model = read_trust(settings), model_name(settings.model)
    store = connect_views(settings.redis_url, store_options(settings), trust, model)
    exchange = PeerExchange(store, owner, feed)
    exchange.start()
    try:
        yield feed
    finally:
        await feed.close()
        await exchange.close()
        await store.close()
