"""Settings of an encode worker. Read by `baton.services.cli.serve`, passed to `baton.services.encode.app.serve`."""

from __future__ import annotations

from baton.settings.choices import Transport
from baton.settings.groups import Count, Port, WorkerProcessSettings


class EncodeSettings(WorkerProcessSettings):
    """Settings of a worker that encodes images for prefill workers."""

    port: Port = 50053
    """gRPC port; 0 takes a free one."""

    metrics_port: Port = 9103
    """Port of Prometheus' /metrics; 0 takes a free one."""

    encode_budget_tokens: Count = 1024
    """Most rows of images that one step encodes, at least one image."""

    media_cache_mib: Count = 256
    """Memory for images that are held, as tensors or as embeddings. Those that are being pulled stay."""

    transport: Transport = Transport.AUTO
    """Transport of embeddings: auto, nixl or stream. The stream serves whom NIXL does not reach."""
