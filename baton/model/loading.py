"""How a model is loaded: config, weights, geometry, attention hook, self-check, packed layers. Called at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from baton.domain.errors import Broken
from baton.kv.geometry import KVGeometry
from baton.model.allow_list import TOKEN_EXACT
from baton.model.attention import hf
from baton.model.config import DtypeChoice, ModelConfig, read_config
from baton.model.decoder import Decoder
from baton.model.errors import UnsupportedModel
from baton.model.geometry import ObservedLayer, kv_geometry, observe_layers
from baton.model.packed import Packing, pack_linears, packing_pays, unpack_linears
from baton.model.selfcheck import CheckResult, check, make_probe, refuse_unless_passed
from baton.model.storage import PageStorage
from baton.model.weights import OnProgress, load_weights

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened while loading, for the log. `packing_note` says why weights are not packed, where they are not."""

    seconds: float
    num_parameters: int
    num_packed_layers: int
    packing_note: str
    check: CheckResult


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has proved itself on pages. `geometry` is what its pages look like."""

    config: ModelConfig
    geometry: KVGeometry
    layers: tuple[ObservedLayer, ...]
    device: str
    report: LoadReport
    module: torch.nn.Module

    def on(self, storage: PageStorage) -> Decoder:
        """The model over a pool of its own geometry. Raises `ValueError` for another one."""
        if storage.geometry != self.geometry:
            raise ValueError("the storage was made for another geometry")
        return Decoder(self.module, self.layers, storage)


def load_model(
    directory: Path,
    *,
    dtype: DtypeChoice = DtypeChoice.AUTO,
    page_size: int = 16,
    max_model_len: int | None = None,
    device: str = "cpu",
    packing: Packing = Packing.AUTO,
    on_progress: OnProgress | None = None,
    allowed: frozenset[str] = TOKEN_EXACT,
) -> LoadedModel:
    """Load and check a Hugging Face causal language model.

    Raises `UnreadableModel` for a directory that is no whole model, `UnsupportedModel` for a model that would be wrong.
    """
    began = time.monotonic()
    config = read_config(directory, dtype=dtype, max_model_len=max_model_len, device=device, allowed=allowed)
    module = load_weights(config, device, on_progress)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    layers = _hooked(lambda: _observe(module, device))
    _set_attention(module, "eager")
    probe = make_probe(module, layers, config.vocab_size, page_size, device)
    _set_attention(module, hf.ATTENTION_NAME)

    def checked() -> CheckResult:
        return _hooked(lambda: check(module, layers, probe, config.dtype, page_size, device))

    result = checked()
    refuse_unless_passed(result, config.model_type)
    num_packed, note, result = _pack(module, config, device, packing, result, checked)
    report = LoadReport(time.monotonic() - began, num_parameters, num_packed, note, result)
    return LoadedModel(config, kv_geometry(layers, config.dtype, page_size), layers, device, report, module)


def _observe(module: torch.nn.Module, device: str) -> tuple[ObservedLayer, ...]:
    _set_attention(module, hf.ATTENTION_NAME)
    return observe_layers(module, int(_text_config(module).num_hidden_layers), device)


def _set_attention(module: Any, name: str) -> None:
    hf.register()
    module.set_attn_implementation(name)
    if _text_config(module)._attn_implementation != name:
        raise UnsupportedModel(f"{type(module).__name__} does not let its attention be replaced, so it cannot be paged")


def _text_config(module: Any) -> Any:
    return module.config.get_text_config()


def _pack(
    module: torch.nn.Module,
    config: ModelConfig,
    device: str,
    packing: Packing,
    unpacked: CheckResult,
    checked: Callable[[], CheckResult],
) -> tuple[int, str, CheckResult]:
    """Pack, check again, and go back if that failed: how many layers, why not more, and the check that holds."""
    if not packing_pays(config.torch_dtype, device, packing):
        return 0, f"not packed: {packing.value}, {config.dtype} on {torch.backends.cpu.get_cpu_capability()}", unpacked
    num_packed = pack_linears(module)
    try:
        result = checked()
    except UnsupportedModel as error:
        unpack_linears(module)
        return 0, f"not packed: {error}", unpacked
    if not result.passed:
        unpack_linears(module)
        return 0, f"not packed: packed logits differ by {result.gap:.2g}", unpacked
    return num_packed, "", result


def _hooked(run: Callable[[], T]) -> T:
    """A first run of foreign code through our hook: whatever it trips over means that the model does not fit it."""
    try:
        return run()
    except (Broken, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"the model does not run on paged attention: {error!r}") from error
