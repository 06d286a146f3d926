"""Settings of a prefill worker. Read by `services.cli.serve`, passed to `services.prefill.app.serve`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.settings.groups import Count, Port, WorkerSettings

LONG_PROMPT_SHARE = 0.04
"""Of the context: the default of `long_prefill_token_threshold`, as vLLM's."""


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

    long_prefill_token_threshold: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of one prompt in a step that other prompts want as well; 0: no bound. Default: 4 % of the context, at
    most three quarters of the token budget. What the others leave goes to the oldest prompt."""

    pin_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the pool that handoffs may pin. Beyond it no new prompt starts."""

    @model_validator(mode="after")
    def _budget_reaches_a_page_edge(self) -> Self:
        if self.token_budget < self.page_size:
            raise ValueError("token_budget must be at least page_size, or a long prompt would never advance")
        if 0 < (self.long_prefill_token_threshold or 0) < self.page_size:
            raise ValueError("long_prefill_token_threshold must be 0 or at least page_size")
        return self

    def long_prompt_tokens(self, max_model_len: int) -> int:
        """The threshold for a model with contexts of at most `max_model_len` tokens."""
        if self.long_prefill_token_threshold is not None:
            return self.long_prefill_token_threshold
        return max(self.page_size, min(int(LONG_PROMPT_SHARE * max_model_len), 3 * self.token_budget // 4))
