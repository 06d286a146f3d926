"""How a model is loaded: config, weights, geometry, attention hook, decoder, self-check, layout. Called at start.

A model is served by its body: the lean one where that exists and proves itself, or else the stock module. Either
computes with the native kernels, where there are some and the model proves itself with them.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from baton.domain.errors import Broken
from baton.kv.geometry import KVGeometry
from baton.model.allow_list import TOKEN_EXACT
from baton.model.attention import hf
from baton.model.config import DtypeChoice, ModelConfig, read_config
from baton.model.decoder import Decoder, StockDecoder, choose_backend, choose_ops
from baton.model.errors import UnsupportedModel
from baton.model.geometry import ObservedLayer, kv_geometry, observe_layers
from baton.model.kernels.choice import KernelChoice, KernelUse, choose_kernels
from baton.model.kernels.library import Kernels
from baton.model.kernels.sampling import NativeChooser
from baton.model.layouts import Layout, choose_arrangement
from baton.model.lean.decoder import LeanDecoder
from baton.model.lean.spec import Unserved, lean_spec
from baton.model.lean.weights import LeanModel, take_weights
from baton.model.quantization import Quantization, QuantizationReport, quantize, refuse_unless_possible
from baton.model.sampler import Chooser, TorchChooser
from baton.model.selfcheck import (
    CheckResult,
    Probe,
    check,
    check_pages,
    make_probe,
    paged_logits,
    refuse_unless_passed,
)
from baton.model.stock_linears import arrange_linears, restore_linears
from baton.model.storage import PageStorage
from baton.model.weights import OnProgress, load_weights

T = TypeVar("T")
Body = torch.nn.Module | LeanModel


class DecoderChoice(enum.Enum):
    """Who runs the model. `AUTO`: the lean decoder where it serves the model and proves itself, else the stock one."""

    AUTO = "auto"
    LEAN = "lean"
    STOCK = "stock"


@dataclass(frozen=True, slots=True)
class WeightReport:
    """How matrices are kept: `num_matrices` of them in `layout`. `note`: why they are plain, where they are."""

    layout: Layout
    num_matrices: int
    note: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened while loading, for the log.

    `stock_note` says why the stock module serves; empty where it does not. `kernel_note` names the kernels in use, or
    says why there are none.
    `check` is the float model's; `quantization` says how far the one that serves is from it, None where it is the same.
    """

    seconds: float
    num_parameters: int
    stock_note: str
    kernel_note: str
    weights: WeightReport
    check: CheckResult
    quantization: QuantizationReport | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has proved itself on pages. `geometry` is what its pages look like."""

    config: ModelConfig
    geometry: KVGeometry
    layers: tuple[ObservedLayer, ...]
    device: str
    report: LoadReport
    body: Body
    kernels: Kernels | None

    def on(self, storage: PageStorage) -> Decoder:
        """The model over a pool of its own geometry. Raises `ValueError` for another one."""
        if storage.geometry != self.geometry:
            raise ValueError("the storage was made for another geometry")
        return open_decoder(self.body, self.layers, storage, self.kernels, self.config.max_model_len)

    def chooser(self) -> Chooser:
        """Who chooses tokens from its logits."""
        return TorchChooser() if self.kernels is None else NativeChooser(self.kernels)


def open_decoder(
    body: Body,
    layers: Sequence[ObservedLayer],
    storage: PageStorage,
    kernels: Kernels | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """`body` over `storage`, with the best attention and operations that this machine, or `kernels`, has for it."""
    backend = choose_backend(layers, storage, kernels)
    if not isinstance(body, LeanModel):
        return StockDecoder(body, layers, storage, backend)
    num_slots = storage.num_pages * storage.geometry.page_size
    max_positions = num_slots if max_model_len is None else min(num_slots, max_model_len)
    return LeanDecoder(body, layers, storage, max_positions, backend, choose_ops(storage, kernels))


def load_model(
    directory: Path,
    *,
    dtype: DtypeChoice = DtypeChoice.AUTO,
    page_size: int = 16,
    max_model_len: int | None = None,
    device: str = "cpu",
    layout: Layout = Layout.AUTO,
    decoder: DecoderChoice = DecoderChoice.AUTO,
    kernels: KernelUse = KernelUse.AUTO,
    quantization: Quantization = Quantization.NONE,
    on_progress: OnProgress | None = None,
    allowed: frozenset[str] = TOKEN_EXACT,
) -> LoadedModel:
    """Load and check a Hugging Face causal language model.

    Raises `UnreadableModel` for a directory that is no whole model, `UnsupportedModel` for a model that would be wrong.
    """
    began = time.monotonic()
    config = read_config(directory, dtype=dtype, max_model_len=max_model_len, device=device, allowed=allowed)
    native = choose_kernels(kernels, device)
    if quantization is Quantization.INT8:
        refuse_unless_possible(native, device)
    module = load_weights(config, device, on_progress)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    layers = _observe(module, device)
    _set_attention(module, "eager")
    geometry = kv_geometry(layers, config.dtype, page_size)
    probe = make_probe(module, layers, config.vocab_size, page_size, device)
    trial = _Trial(config, layers, geometry, probe, device, native)
    _set_attention(module, hf.ATTENTION_NAME)
    trial, body, stock_note, result = _choose_kernels_and_body(module, decoder, trial)
    del module  # a lean body whose matrices are kept otherwise keeps nothing of it
    weights, quantized = WeightReport(Layout.PLAIN, 0, "int8"), None
    if quantization is Quantization.INT8:
        quantized = quantize(body, stock_note, trial.choice, trial.logits)
    else:
        weights, result = _arrange(body, layout, trial, result)
    seconds = time.monotonic() - began
    report = LoadReport(seconds, num_parameters, stock_note, trial.choice.note, weights, result, quantized)
    return LoadedModel(config, geometry, layers, device, report, body, trial.choice.kernels)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What every body of a model has to pass."""

    config: ModelConfig
    layers: tuple[ObservedLayer, ...]
    geometry: KVGeometry
    probe: Probe
    device: str
    choice: KernelChoice

    def check(self, body: Body) -> CheckResult:
        """Its logits. Raises `UnsupportedModel` where it does not even run."""
        return _hooked(lambda: check(self._opening(body), self.geometry, self.probe, self.device))

    def logits(self, body: Body) -> torch.Tensor:
        """What it says after every chunk of the prompts: [tokens, vocab_size], float32. Raises `UnsupportedModel`."""
        return _hooked(lambda: paged_logits(self._opening(body), self.geometry, self.probe, self.device))[0]

    def check_pages(self, body: Body, other: Body) -> CheckResult:
        """Whether either could go on from the other's pages. Raises `UnsupportedModel`."""
        bodies = self._opening(body), self._opening(other)
        return _hooked(lambda: check_pages(*bodies, self.geometry, self.probe, self.device))

    def _opening(self, body: Body) -> Callable[[PageStorage], Decoder]:
        return lambda storage: open_decoder(body, self.layers, storage, self.choice.kernels)


def _choose_kernels_and_body(
    module: torch.nn.Module, choice: DecoderChoice, trial: _Trial
) -> tuple[_Trial, Body, str, CheckResult]:
    """As `_choose_body`; where nothing passes with the kernels, without them. Raises `UnsupportedModel`."""
    try:
        return trial, *_choose_body(module, choice, trial)
    except UnsupportedModel as error:
        if trial.choice.kernels is None:
            raise
        plain = replace(trial, choice=KernelChoice(None, f"no native kernels: with them {error}"))
        return plain, *_choose_body(module, choice, plain)


def _choose_body(module: torch.nn.Module, choice: DecoderChoice, trial: _Trial) -> tuple[Body, str, CheckResult]:
    """A body that has passed, why it is the stock one where it is, and its result. Raises `UnsupportedModel`."""
    note = "asked for"
    if choice is not DecoderChoice.STOCK:
        try:
            lean, result = _make_lean(module, trial)
            return lean, "", result
        except UnsupportedModel as error:
            if choice is DecoderChoice.LEAN:
                raise UnsupportedModel(f"no lean decoder: {error}. Use decoder auto or stock") from error
            note = str(error)
    result = trial.check(module)
    refuse_unless_passed(result, trial.config.model_type)
    return module, note, result


def _make_lean(module: torch.nn.Module, trial: _Trial) -> tuple[LeanModel, CheckResult]:
    """The lean body, on the stock module's memory, and its result. Raises `UnsupportedModel` with a reason."""
    spec = lean_spec(_text_config(module).to_dict(), trial.layers)
    if isinstance(spec, Unserved):
        raise UnsupportedModel(spec.reason)
    lean = take_weights(module, spec)
    result, pages = trial.check(lean), trial.check_pages(lean, module)
    for what, found in (("logits", result), ("pages", pages)):
        if not found.passed:
            raise UnsupportedModel(f"its {what} differ by {found.gap:.2g}, more than {found.bound:.2g}")
    return lean, result


def _observe(module: torch.nn.Module, device: str) -> tuple[ObservedLayer, ...]:
    _set_attention(module, hf.ATTENTION_NAME)
    return _hooked(lambda: observe_layers(module, int(_text_config(module).num_hidden_layers), device))


def _set_attention(module: Any, name: str) -> None:
    hf.register()
    module.set_attn_implementation(name)
    if _text_config(module)._attn_implementation != name:
        raise UnsupportedModel(f"{type(module).__name__} does not let its attention be replaced, so it cannot be paged")


def _text_config(module: Any) -> Any:
    return module.config.get_text_config()


def _arrange(body: Body, wanted: Layout, trial: _Trial, plain: CheckResult) -> tuple[WeightReport, CheckResult]:
    """Keep the matrices as pays, check again, and go back if that failed: what came of it, and the check that holds."""
    arrangement = choose_arrangement(wanted, trial.choice.kernels, trial.config.torch_dtype, trial.device)
    if arrangement is None:
        cpu = torch.backends.cpu.get_cpu_capability()
        return WeightReport(Layout.PLAIN, 0, f"{wanted.value}, {trial.config.dtype} on {trial.device} {cpu}"), plain
    count = body.arrange(arrangement) if isinstance(body, LeanModel) else arrange_linears(body, arrangement)
    try:
        result = trial.check(body)
        problem = "" if result.passed else f"logits differ by {result.gap:.2g}"
    except UnsupportedModel as error:
        result, problem = plain, str(error)
    if not problem:
        return WeightReport(arrangement.layout, count, ""), result
    if isinstance(body, LeanModel):
        body.restore()
    else:
        restore_linears(body)
    return WeightReport(Layout.PLAIN, 0, f"not {arrangement.layout.value}: {problem}"), plain


def _hooked(run: Callable[[], T]) -> T:
    """A first run of foreign code through our hook: whatever it trips over means that the model does not fit it."""
    try:
        return run()
    except (Broken, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"the model does not run on paged attention: {error!r}") from error
