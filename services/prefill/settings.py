"""The prefill worker's settings. Read by `services.cli.serve`, passed to `services.prefill.app.serve`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.settings.groups import Port, WorkerSettings


class PrefillSettings(WorkerSettings):
    """Computes prompts and offers their pages."""

    worker_id: Annotated[str, Field(min_length=1)] = "prefill-0"
    """Stable name of this worker; survives a restart."""

    port: Port = 50051
    """gRPC port; 0 takes a free one."""

    metrics_port: Port = 9101
    """Port of Prometheus' /metrics; 0 takes a free one."""

    pin_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the pool that handoffs may pin; beyond it no new prompt is started."""
