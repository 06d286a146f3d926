"""Settings of a decode worker. Read by `baton.services.cli.serve`, passed to `baton.services.decode.app.serve`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from baton.domain.timing.step_time import StepTimeModel
from baton.engine.chunking import ChunkBudget, ChunkPolicy
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS
from baton.engine.overlap.page_fence import SPARE_PAGES
from baton.kv.growth import GrowthPolicy, GrowthReserve
from baton.settings.groups import Count, Port, Seconds, WorkerSettings
from baton.settings.links import LinkSettings

MIN_CHUNK_TOKENS = 256
"""Window slots of a prompt that is computed here reach for chunks of that many tokens, whatever the budget is now."""

MAX_TREE_DEPTH = 15
_WIDTHS = frozenset("12345678")


class DecodeSettings(WorkerSettings, LinkSettings):
    """Settings of a worker that imports KV and decodes."""

    port: Port = 50052
    """gRPC port; 0 takes a free one."""

    metrics_port: Port = 9102
    """Port of Prometheus' /metrics; 0 takes a free one."""

    max_rows: Count = 64
    """Most sequences generated at once."""

    max_reservations: Annotated[int, Field(ge=0)] | None = None
    """Most reservations at once that are no sequence yet; default: as many as rows."""

    token_budget: Annotated[int, Field(ge=0)] = 0
    """Most tokens of a step, rows and prompts together, if this worker computes prompts too; 0: it computes none. A
    small budget keeps the gaps between tokens even, a large one computes prompts sooner. `baton role` changes it, and
    the two bounds above, while the worker runs."""

    chunking: ChunkPolicy = ChunkPolicy.FIXED
    """What bounds the prompt tokens of a step besides `token_budget`: fixed (nothing), equal (the time of a prompt's
    first step) or itl (`itl_objective_s`). The last two go by the durations of earlier steps."""

    itl_objective_s: Seconds = 0.1
    """Longest time between two tokens of a sequence that prompts beside it should cause, if `chunking` is itl."""

    reservation_deadline_s: Seconds = 10.0
    """Longest lifetime of an unclaimed reservation; a router may ask for less."""

    pull_deadline_s: Seconds = 5.0
    """Longest duration of one pull."""

    pull_window_pages: Count = 64
    """Most pages in flight per handoff."""

    cuda_graphs: bool = True
    """On a GPU, run decode steps as CUDA graphs where the model's steps can be captured."""

    overlap_scheduling: bool = False
    """Schedule and start a step while the one before it runs, so that the device does not wait for the host. For GPUs;
    on a CPU there is nothing to overlap with. Tokens do not depend on it. Steps with drafts, masks, penalties, log
    probabilities or prompts wait for the one before."""

    host_pages: Annotated[int, Field(ge=0)] | None = None
    """Pages of host memory for preempted sequences; default: as many whole pages as fit into the pool's bytes."""

    growth_reserve: GrowthPolicy = GrowthPolicy.NONE
    """Pages kept free for running sequences to grow when a new one asks for room: none, ratio (of the longest outputs,
    adaptive), peak (of use under the output lengths seen here) or full (the longest outputs)."""

    growth_clip_tokens: Count = 4096
    """Longest further output of a sequence that the growth reserve counts on; never limits an output."""

    drafter: str = "none"
    """Proposes tokens that a step verifies, so that it may give several: none, ngram (what followed the same words
    before, in prompt and output), ngram-shared (also in earlier outputs of the tenant), draft-model, eagle or
    mtp (a model, EAGLE head or MTP layer, see `draft_model`), or the name of a plugin. Tokens do not depend on it."""

    draft_tree: str = ""
    """The drafter proposes trees: the branches of each node at the first depths, such as 3,2 (each from 1 to 8). Steps
    verify of them what pays. Empty: chains. For models without sliding windows, latents and several MTP layers."""

    @model_validator(mode="after")
    def _budget_reaches_a_page_edge(self) -> Self:
        if 0 < self.token_budget < self.page_size:
            raise ValueError("token_budget must be 0 or at least page_size, or a long prompt would never advance")
        return self

    @field_validator("draft_tree")
    @classmethod
    def _is_a_list_of_widths(cls, text: str) -> str:
        _tree_widths(text)
        return text

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of a running sequence for whose window parts there are slots: its own, drafts, and a step ahead.

        With steps in flight two pages more: those that gave way to cached ones, until the steps end that read them.
        """
        num_tokens = 2 if self.drafter == "none" else 1 + MAX_DRAFT_TOKENS
        return num_tokens + SPARE_PAGES * self.page_size if self.overlap_scheduling else num_tokens

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of one sequence in a step, for window slots. Budgets may be raised later, also from 0."""
        return max(self.max_row_tokens, self.token_budget, MIN_CHUNK_TOKENS)

    @property
    def tree_widths(self) -> tuple[int, ...]:
        """`draft_tree` as numbers; none: chains."""
        return _tree_widths(self.draft_tree)

    def chunk_budget(self, page_size: int, step_time: StepTimeModel) -> ChunkBudget:
        """Sizes the chunks of one engine."""
        return ChunkBudget(self.token_budget, page_size, self.chunking, step_time, self.itl_objective_s)

    def growth(self, page_size: int) -> GrowthReserve:
        """The growth reserve of one engine."""
        return GrowthReserve(self.growth_reserve, page_size, self.growth_clip_tokens)


def _tree_widths(text: str) -> tuple[int, ...]:
    """Raises `ValueError` for anything else than a few small numbers, separated by commas."""
    parts = text.split(",") if text else []
    if len(parts) > MAX_TREE_DEPTH or any(part not in _WIDTHS for part in parts):
        raise ValueError(f"draft_tree must be at most {MAX_TREE_DEPTH} numbers from 1 to 8, separated by commas: 3,2")
    return tuple(map(int, parts))
