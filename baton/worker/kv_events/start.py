"""Starts the publisher of a worker's cache events, where the settings ask for one. Called once, by `app`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from baton.kv.events.event import CacheEvent
from baton.settings.base import SettingsError
from baton.settings.groups import WorkerSettings
from baton.telemetry.logs import get_logger

log = get_logger()


def start_kv_events(
    settings: WorkerSettings, page_size: int, stack: AsyncExitStack
) -> Callable[[Sequence[CacheEvent]], None] | None:
    """Binds the sockets, and closes them with `stack`; returns what publishes a turn's events.

    None without an endpoint. Raises `SettingsError` without pyzmq, and for an address that cannot be bound.
    """
    endpoint = settings.kv_events_endpoint
    if endpoint is None:
        return None
    try:
        import zmq

        from baton.worker.kv_events.publisher import KvEventPublisher, PublisherEndpoints
    except ImportError as error:
        hint = "Install the extra: pip install 'baton-serve[zmq]'."
        raise SettingsError(f"kv_events_endpoint={endpoint}", why="pyzmq is not installed", hint=hint) from error
    endpoints = PublisherEndpoints(endpoint, settings.kv_events_replay_endpoint)
    try:
        publisher = KvEventPublisher(endpoints, page_size, settings.kv_events_format)
    except zmq.ZMQError as error:
        where = f"kv_events_endpoint={endpoint}, replay {endpoints.replay}"
        raise SettingsError(where, why=str(error), hint="Give addresses of this machine that are free.") from error
    stack.callback(publisher.close)
    log.info(
        "kv_events_published", address=publisher.address, replay=publisher.replay_address,
        format=settings.kv_events_format.value,
    )  # fmt: skip
    return publisher.publish
