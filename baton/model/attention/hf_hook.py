"""The hook into transformers: one attention function under one name, without a mask function beside it.

Without a mask function of that name transformers builds no mask. It passes Q, K and V of the new tokens of all requests
as one row of tokens. The `AttentionHandler` of the running step, a context variable, decides what a call does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton.model.attention.base import AttentionBackend, AttentionCall, StepMetadata
from baton.model.storage import PageStorage

ATTENTION_NAME = "baton_pages"

LATENT = "baton_latent"
"""Attribute of an attention module that hands over latents (`attention.latent`): its `LatentProjections`."""


class AttentionHandler(Protocol):
    """Takes one layer's new K and V, [tokens, num_kv_heads, dim] each, and computes its attention."""

    def attend(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns [tokens, num_heads, v_head_dim]."""
        ...


_handler: ContextVar[AttentionHandler] = ContextVar("baton_layer_handler")


@contextmanager
def use_handler(handler: AttentionHandler) -> Iterator[None]:
    """Makes `handler` serve this thread's attention calls inside the `with` statement."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def register() -> None:
    """Registers the hook in transformers. Idempotent."""
    from transformers import AttentionInterface  # slow to import, and not needed for shared weights

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_ignored: object,
) -> tuple[torch.Tensor, None]:
    """`query` [1, num_heads, tokens, dim], `key` and `value` [1, num_kv_heads, tokens, dim] -> [1, tokens, ...]."""
    if attention_mask is not None:
        raise ValueError("the model built its own attention mask, which pages cannot honour")
    call = AttentionCall(
        layer=module.layer_idx,
        query=query[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux,
        latent=getattr(module, LATENT, None),
    )
    out = _handler.get().attend(call, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return out.unsqueeze(0), None


@dataclass(slots=True)
class PagedHandler:
    """Writes new K and V into their pages, then attends. `num_calls` must end as the number of layers."""

    storage: PageStorage
    backend: AttentionBackend
    step: StepMetadata
    num_calls: int = 0

    def attend(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        step = self.step.of(is_apart=self.storage.is_apart(call.layer))
        self.storage.write(call.layer, step.token_pages, step.token_slots, keys, values)
        return self.backend.attend(call)
