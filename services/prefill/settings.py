"""Settings of a prefill worker. Read by `services.cli.serve`, passed to `services.prefill.app.serve`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.settings.groups import Count, Port, WorkerSettings


class PrefillSettings(WorkerSettings):
    """Settings of a worker that computes prompts and exports their KV."""

    port: Port = 50051
    """gRPC port; 0 takes a free one."""

    metrics_port: Port = 9101
    """Port of Prometheus' /metrics; 0 takes a free one."""

    token_budget: Count = 512
    """Most prompt tokens computed in one step."""

    max_partial_prompts: Count = 4
    """Most prompts that a step may leave half-done. Those that end in it do not count."""

    pin_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the pool that handoffs may pin. Beyond it no new prompt starts."""

    @model_validator(mode="after")
    def _budget_reaches_a_page_edge(self) -> Self:
        if self.token_budget < self.page_size:
            raise ValueError("token_budget must be at least page_size, or a long prompt would never advance")
        return self
