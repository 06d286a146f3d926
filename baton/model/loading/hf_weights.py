"""Reads a stock causal language model from a local directory, without network, gradients or checkpoint code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from baton.model.errors import UnreadableModel
from baton.model.loading.config import ModelConfig
from baton.model.loading.stored_weights import refuse_packed_tensors, refuse_unused_tensors

OnProgress = Callable[[int, int], None]
"""Called with (tensors read, total tensors) while weights are read."""


def load_weights(config: ModelConfig, device: str = "cpu", on_progress: OnProgress | None = None) -> torch.nn.Module:
    """The stock model with eager attention, in eval mode, frozen, on `device`, in `config.dtype`.

    Raises `UnreadableModel` where files are missing, truncated, or do not fill the architecture, `UnsupportedModel`
    where they hold other numbers than it computes with.
    """
    refuse_packed_tensors(config.directory)
    try:
        with _progress(on_progress):
            model, report = AutoModelForCausalLM.from_pretrained(
                config.directory,
                dtype=config.torch_dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UnreadableModel(f"the weights in {config.directory} cannot be read: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise UnreadableModel(
            f"{len(missing)} tensors are missing from {config.directory}, first {missing[0]}; download the model again"
        )
    assert isinstance(model, torch.nn.Module)
    refuse_unused_tensors(model, report["unexpected_keys"])
    return model.to(device).eval().requires_grad_(False)


class _Progress:
    """Replaces the loader's terminal progress bar."""

    def __init__(self, items: Any, on_progress: OnProgress | None) -> None:
        self._items = items
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[Any]:
        total = len(self._items)
        for done, item in enumerate(self._items, 1):
            yield item
            if self._on_progress is not None:
                self._on_progress(done, total)


@contextmanager
def _progress(on_progress: OnProgress | None) -> Iterator[None]:
    """Turns the loader's progress bars into calls of `on_progress`."""

    def make(_factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Progress:
        return _Progress(args[0] if args else kwargs.get("iterable", ()), on_progress)

    previous = hf_logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(previous)
