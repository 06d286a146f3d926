"""The router's HTTP side over a store in memory, for tests with their own dispatcher."""

from __future__ import annotations

from baton.domain.ids import OwnerId
from baton.services.router.frontend import ApiLimits, Frontend, StoreAccess, build_frontend
from baton.services.router.generation import Dispatcher
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel
from baton.store.memory_store import MemoryStore
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.request_traces import RequestLog, RequestTraces, TraceSink
from tests.unit.router.text.text_models import bundled


def memory_frontend(
    dispatcher: Dispatcher,
    limits: ApiLimits,
    *sinks: TraceSink,
    writer: StoreWriter | None = None,
    text: TextModel | None = None,
    images: ImageModel | None = None,
) -> Frontend:
    """`writer`: a started one, if requests are made. `text`: default the bundled model's. `images`: of that model."""
    store = MemoryStore()
    writer = writer or StoreWriter(store)
    store_access = StoreAccess(store, writer, OwnerId("router/0"), SupersedeListener())
    traces = RequestTraces("router", limits.model_name, RequestLog.OFF, sinks)
    return build_frontend(text or bundled(), dispatcher, limits, traces, store_access, images)
