"""Reads a stock causal language model from a local directory, without network, gradients or checkpoint code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError

from baton.model.errors import UnreadableModel
from baton.model.loading.config import ModelConfig, stock_config
from baton.model.loading.dequantize.checkpoint import lazy_tensors
from baton.model.loading.dequantize.methods import QUANTIZATION_KEYS
from baton.model.loading.dequantize.plan import CheckpointPlan
from baton.model.loading.stored_weights import (
    refuse_packed_tensors,
    refuse_unused_tensors,
    stored_tensors,
    without_zero_biases,
)
from baton.model.vision.text_model import VisionTextModel
from baton.model.vision.tower import VisionTower

OnProgress = Callable[[int, int], None]
"""Called with (tensors read, total tensors) while weights are read."""


def load_weights(
    config: ModelConfig, device: str = "cpu", on_progress: OnProgress | None = None
) -> tuple[torch.nn.Module, str]:
    """The stock model with eager attention, in eval mode, frozen, on `device`, in `config.dtype`; and, for the log,
    what was done to its stored weights (empty where they are plain).

    Raises `UnreadableModel` where files are missing, truncated, or do not fill the architecture, `UnsupportedModel`
    where they hold other numbers than it computes with.
    """
    stored, files = stored_tensors(config.directory)
    plan, notes = CheckpointPlan((), ()), []
    if config.weight_format is not None:
        plan = config.weight_format.plan(stored, config.torch_dtype)
        notes.append(f"{config.weight_format.method}: {len(plan.weights)} dequantized, {len(plan.ignored)} ignored")
    refuse_packed_tensors({name: tensor for name, tensor in stored.items() if name not in plan.consumed})
    try:
        tensors = lazy_tensors(files, plan)
        if config.multimodal is not None:
            names = config.multimodal.text_names(tensors)
            notes.append(f"text model of {config.multimodal.model_type}: {len(tensors) - len(names)} tensors not read")
            tensors = {text_name: tensors[name] for name, text_name in names.items()}
        with _progress(on_progress):
            model, report = _read_tensors(config, tensors) if notes else _read_plain(config)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UnreadableModel(f"the weights in {config.directory} cannot be read: {error}") from error
    _refuse_missing(config, report["missing_keys"])
    assert isinstance(model, torch.nn.Module)
    refuse_unused_tensors(model, without_zero_biases(report["unexpected_keys"], tensors))
    return model.to(device).eval().requires_grad_(False), "; ".join(notes)


def load_vision_weights(
    config: ModelConfig, device: str = "cpu", on_progress: OnProgress | None = None
) -> tuple[VisionTextModel, VisionTower]:
    """The text model and the vision tower of a vision-language model, both as `load_weights` loads a text model.

    Raises what `load_weights` raises.
    """
    whole, part = _load_whole(config, device, on_progress), _text_part(config)
    text = VisionTextModel(getattr(whole.model, part), whole.lm_head)
    delattr(whole.model, part)  # the layers may be packed, which must free the plain ones
    return text, VisionTower(whole.model)


def load_tower(config: ModelConfig, device: str = "cpu", on_progress: OnProgress | None = None) -> VisionTower:
    """The vision tower alone. Of the text model one layer and the table of tokens are read, and let go.

    Raises what `load_weights` raises.
    """
    from transformers import AutoConfig

    stock = AutoConfig.from_pretrained(config.directory, local_files_only=True)
    text = stock.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    whole = _load_whole(config, device, on_progress, stock)
    delattr(whole.model, _text_part(config))
    return VisionTower(whole.model)


def _text_part(config: ModelConfig) -> str:
    """The name of the text model in the whole one."""
    assert config.vision is not None
    return config.vision.text_part


def _load_whole(config: ModelConfig, device: str, on_progress: OnProgress | None, stock: Any = None) -> Any:
    """transformers' vision-language model. `stock`: its config, if it is not the checkpoint's."""
    from transformers import AutoModelForImageTextToText  # slow to import

    stored, files = stored_tensors(config.directory)
    refuse_packed_tensors(stored)
    tensors = lazy_tensors(files, CheckpointPlan((), ()))
    try:
        with _progress(on_progress):
            options = _options(config) if stock is None else {**_options(config), "config": stock}
            whole, report = AutoModelForImageTextToText.from_pretrained(
                config.directory, trust_remote_code=False, **options
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UnreadableModel(f"the weights in {config.directory} cannot be read: {error}") from error
    _refuse_missing(config, report["missing_keys"])
    refuse_unused_tensors(whole, without_zero_biases(report["unexpected_keys"], tensors))
    return whole.to(device).eval().requires_grad_(False)


def _refuse_missing(config: ModelConfig, names: Collection[str]) -> None:
    if missing := sorted(names):
        raise UnreadableModel(
            f"{len(missing)} tensors are missing from {config.directory}, first {missing[0]}; download the model again"
        )


def _read_plain(config: ModelConfig) -> Any:
    from transformers import AutoModelForCausalLM  # slow to import, and not needed for shared weights

    return AutoModelForCausalLM.from_pretrained(config.directory, trust_remote_code=False, **_options(config))


def _read_tensors(config: ModelConfig, tensors: Mapping[str, Any]) -> Any:
    """The text model from its config without quantisation, filled with `tensors` one by one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    stock = stock_config(config.directory, config.multimodal)
    for key in QUANTIZATION_KEYS:
        stock.__dict__.pop(key, None)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(stock)]
    return architecture.from_pretrained(None, config=stock, state_dict=tensors, **_options(config))


def _options(config: ModelConfig) -> dict[str, Any]:
    return {
        "dtype": config.torch_dtype,
        "attn_implementation": "eager",
        "local_files_only": True,
        "output_loading_info": True,
    }


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

    from transformers.utils import logging as hf_logging

    previous = hf_logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(previous)
