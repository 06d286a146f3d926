"""The stock decoder: runs the transformers module over one page pool.

Called by the runner on the engine thread, and by the self-check. Knows pages and positions, no requests.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from baton.domain.errors import Broken
from baton.model.attention.base import AttentionBackend, StepMetadata
from baton.model.attention.hf_hook import PagedHandler, use_handler
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.window_slots import clear_partial_pages
from baton.model.decoders.base import LogitsReader, read_in_parts
from baton.model.decoders.capture import HiddenCapture
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds
from baton.model.vision.text_model import stock_inputs


class StockDecoder:
    """Runs `model`, the stock module with the paged hook set. `layers`: its observed layers."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[ObservedLayer],
        storage: PageStorage,
        backend: AttentionBackend,
    ) -> None:
        self._model = model
        self._num_layers = len(layers)
        self._storage = storage
        self._backend = backend
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        reader: LogitsReader | None = None,
        embeds: Embeds | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`. Raises `Broken` if a layer was skipped."""
        clear_partial_pages(step, self._storage)
        self._backend.begin(step)
        handler = PagedHandler(self._storage, self._backend, step)
        with use_handler(handler), torch.inference_mode():
            inputs = stock_inputs(self._model, input_ids, positions, embeds)
            if reader is None:
                with _capturing(self._model.base_model, capture):
                    logits = self._logits(keep, inputs)
            else:
                logits = self._read_logits(keep, inputs, reader, capture)
        if handler.num_calls != self._num_layers:
            raise Broken(f"{handler.num_calls} of {self._num_layers} layers attended")
        return logits

    def _logits(self, keep: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        wanted = {"logits_to_keep": keep} if self._keeps_logits else {}
        logits: torch.Tensor = self._model(**inputs, **wanted).logits[0]
        return logits if self._keeps_logits else logits[keep]

    def _read_logits(
        self, keep: torch.Tensor, inputs: dict[str, Any], reader: LogitsReader, capture: HiddenCapture | None
    ) -> torch.Tensor:
        """Runs the layers once and the model's own head on a few tokens at a time.

        What a family does behind the head (a soft cap, a scale) is part of its `forward`. So that runs for each part,
        with an output of the layers that is there already.
        """
        base: Any = self._model.base_model
        with _capturing(base, capture):
            output = base(**inputs)
        hidden = output.last_hidden_state[0]

        def head(rows: torch.Tensor) -> torch.Tensor:
            part = copy.copy(output)
            part.last_hidden_state = rows[None]
            every = int64_tensor(range(len(rows)), rows.device)
            with _replaced_forward(base, part):
                return self._logits(every, {"input_ids": every[None], "use_cache": False})

        read_in_parts(reader, hidden[reader.places], head)
        return head(hidden[keep])


@contextmanager
def _replaced_forward(module: torch.nn.Module, output: object) -> Iterator[None]:
    """Inside the block the module returns `output`, whatever its input is."""
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _capturing(base: Any, capture: HiddenCapture | None) -> Iterator[None]:
    """Inside the block a call of `base`, the model without its head, fills `capture`; None: nothing is hooked."""
    if capture is None:
        yield
        return
    taken = capture

    def before_layer(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        taken.add(hidden[0].clone())

    def after_all(_: object, __: object, output: Any) -> None:
        taken.add(output.last_hidden_state[0])

    hooks = [base.layers[index].register_forward_pre_hook(before_layer, with_kwargs=True) for index in taken.spec.after]
    if taken.spec.final:
        hooks.append(base.register_forward_hook(after_all))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
