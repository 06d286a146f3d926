"""Settings of a prefill worker. Read by `baton.services.cli.serve`, passed to `baton.services.prefill.app.serve`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.domain.timing.step_time import StepTimeModel
from baton.engine.chunking import ChunkPolicy
from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from baton.settings.choices import VisionKind
from baton.settings.groups import Count, Port, Seconds, WorkerSettings
from baton.settings.links import LinkSettings
from baton.settings.tiers import TierSettings

LONG_PROMPT_SHARE = 0.04
"""Of the context: the default of `long_prefill_token_threshold`, as vLLM's."""


class PrefillSettings(WorkerSettings, LinkSettings, TierSettings):
    """Settings of a worker that computes prompts and exports their KV."""

    port: Port = 50051
    """gRPC port; 0 takes a free one."""

    metrics_port: Port = 9101
    """Port of Prometheus' /metrics; 0 takes a free one."""

    token_budget: Count = 512
    """Most prompt tokens computed in one step. `baton role` changes it while the worker runs, also to 0: no new
    prompts."""

    chunking: ChunkPolicy = ChunkPolicy.FIXED
    """What bounds the prompt tokens of a step besides `token_budget`: fixed (nothing), equal (the time of a prompt's
    first step, as its context grows) or, for decode workers that compute prompts, itl (`itl_objective_s`); prefill
    takes itl for fixed, as no tokens wait beside its steps. Equal and itl go by the durations of earlier steps."""

    max_partial_prompts: Count = 4
    """Most prompts that a step may leave half-done. Those that end in it do not count."""

    long_prefill_token_threshold: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of one prompt in a step that shorter prompts behind it want as well; 0: no bound. Default: 4 % of the
    context, at most three quarters of the token budget. What the others leave goes to the oldest prompt."""

    prefill_policy: PrefillPolicy = PrefillPolicy.SRPT
    """Order of prompts, half-done and waiting ones together: fcfs (arrival), lpm (longest cached prefix first), srpt
    (fewest tokens left first) or edf (`ttft_objective_s`). Ties go by arrival."""

    oldest_prompt_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.25
    """Share of every step's tokens that the oldest prompt gets whatever the policy; at least one page. It bounds how
    long a prompt that others overtake can take."""

    max_overtakes: Count = 64
    """Most prompts that are admitted past one for which pages are missing. With fcfs none are."""

    ttft_objective_s: Seconds = 1.0
    """For edf: a prompt is due this long after its arrival, for each `token_budget` of its length; never after its
    request's own deadline."""

    prefix_sharing: bool = True
    """Hold a prompt while another one computes the next pages of the prefix that both have, so that they are computed
    once."""

    overlap_scheduling: bool = False
    """On a GPU, schedule and start a step while the one before it runs, so that the device does not wait for the host.
    Tokens and pages do not depend on it. A CPU has nothing to overlap with and ignores it."""

    encode_budget_tokens: Count = 1024
    """Most rows of images that one step encodes, at least one image; then text goes on."""

    media_cache_mib: Count = 256
    """Memory for images that are held, as tensors or as embeddings. Those that a prompt still needs stay."""

    pin_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the pool that handoffs may pin. Beyond it no new prompt starts."""

    @model_validator(mode="after")
    def _tiers_have_digests(self) -> Self:
        tiers = {"file_tier_dir": self.file_tier_dir is not None, "host_tier_mib": self.host_tier_mib > 0}
        for name, is_there in tiers.items():
            if is_there and not self.digests:
                raise ValueError(f"{name} needs digests: what is read back is compared with them")
        return self

    @model_validator(mode="after")
    def _budget_reaches_a_page_edge(self) -> Self:
        if self.token_budget < self.page_size:
            raise ValueError("token_budget must be at least page_size, or a long prompt would never advance")
        if 0 < (self.long_prefill_token_threshold or 0) < self.page_size:
            raise ValueError("long_prefill_token_threshold must be 0 or at least page_size")
        return self

    @property
    def pulls_embeddings(self) -> bool:
        """True if encode workers may encode its images."""
        return self.vision in (VisionKind.AUTO, VisionKind.REMOTE)

    def long_prompt_tokens(self, max_model_len: int) -> int:
        """The threshold for contexts of at most `max_model_len` tokens; by default of any token budget."""
        if self.long_prefill_token_threshold is not None:
            return self.long_prefill_token_threshold
        return max(self.page_size, int(LONG_PROMPT_SHARE * max_model_len))

    def equal_time(self, step_time: StepTimeModel) -> StepTimeModel | None:
        """The model by which steps take equal time; None: they need not."""
        return step_time if self.chunking is ChunkPolicy.EQUAL else None

    def order(self) -> PolicySettings:
        """The order of prompts."""
        return PolicySettings(
            self.prefill_policy,
            self.oldest_prompt_share,
            self.max_overtakes,
            self.ttft_objective_s,
            self.prefix_sharing,
            by_priority=self.priority_scheduling,
        )
