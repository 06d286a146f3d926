"""Loads a model: config, weights, geometry, attention hook, decoder, self-check, layout. Called at start.

One of two implementations serves a model: the lean one where it exists and passes the self-check, otherwise the stock
module. Either one uses the native kernels where they are available and the model passes the check with them.
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
from baton.domain.worker import NO_KERNELS
from baton.kv.geometry import KVGeometry
from baton.model.attention import hf_hook
from baton.model.attention.backend_choice import choose_backend
from baton.model.attention.latent import keep_latents, projecting_linears
from baton.model.attention.layers import ObservedLayer, kv_geometry, observe_layers
from baton.model.decoders.base import Decoder
from baton.model.decoders.lean import LeanDecoder
from baton.model.decoders.lean_spec import Unsupported, lean_spec
from baton.model.decoders.lean_weights import LeanModel, make_lean_model
from baton.model.decoders.native_ops import choose_ops
from baton.model.decoders.stock import StockDecoder
from baton.model.drafts.chains import PageDrafts
from baton.model.drafts.draft_model import DraftModel
from baton.model.drafts.eagle import EagleDrafts
from baton.model.drafts.eagle_weights import EagleWeights, load_eagle_weights
from baton.model.drafts.head_files import is_eagle_head
from baton.model.drafts.head_reader import HeadTarget
from baton.model.drafts.mtp_depths import DepthDrafts
from baton.model.drafts.mtp_weights import load_mtp_weights
from baton.model.errors import UnsupportedModel
from baton.model.huge_pages import move_parameters
from baton.model.kernels.library import Kernels
from baton.model.linears.packed_modules import module_tensors, pack_modules, unpack_modules
from baton.model.linears.packing import WeightLayout, choose_packer
from baton.model.loading.allow_list import TOKEN_EXACT
from baton.model.loading.config import DtypeChoice, ModelConfig, read_config
from baton.model.loading.hf_weights import OnProgress, load_vision_weights, load_weights
from baton.model.loading.image_check import ImageLogits, check_image, image_reference
from baton.model.loading.kernel_choice import KernelChoice, KernelUse, choose_kernels
from baton.model.loading.quantization import Quantization, quantize, require_int8_support
from baton.model.loading.report import LoadReport, WeightReport
from baton.model.loading.self_check import (
    CheckResult,
    ReferenceLogits,
    check_logits,
    check_pages,
    paged_logits,
    reference_logits,
    require_passed,
)
from baton.model.sampling.native import NativeSampler
from baton.model.sampling.sampler import SamplerBackend, TorchSampler
from baton.model.smaps import WeightMemory, measure_memory
from baton.model.storage import PageStorage
from baton.model.vision.text_model import VisionTextModel
from baton.model.vision.tower import VisionTower

T = TypeVar("T")
ModelImpl = torch.nn.Module | LeanModel


class DecoderChoice(enum.Enum):
    """Choice of the decoder. `AUTO`: the lean one if it supports the model and passes the self-check, else stock."""

    AUTO = "auto"
    LEAN = "lean"
    STOCK = "stock"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed the self-check. `geometry`: of its pages; `draft`, `head`: what has their draft layers.

    `head`: its layers; () for none.
    """

    config: ModelConfig
    geometry: KVGeometry
    layers: tuple[ObservedLayer, ...]
    device: str
    report: LoadReport
    impl: ModelImpl
    kernels: Kernels | None
    tower: VisionTower | None = None
    draft: LoadedModel | None = None
    head: tuple[EagleWeights, ...] = ()

    def with_draft(self, draft: LoadedModel) -> LoadedModel:
        """This model with `draft` in the draft layers of its pages. Raises `UnsupportedModel` if they do not fit."""
        if (whole := draft.geometry.without_window_part()) != draft.geometry:
            draft = replace(draft, geometry=whole)
        geometry = self.geometry.with_draft_layers(draft.geometry.group.attention_layers)
        if geometry.draft != draft.geometry or self.device != draft.device:
            raise UnsupportedModel("the draft model was loaded for other pages or another device than the model")
        if draft.config.max_model_len < self.config.max_model_len:
            contexts = f"{draft.config.max_model_len} tokens, the model's {self.config.max_model_len}"
            raise UnsupportedModel(f"the draft model's context is {contexts}; lower max_model_len")
        return replace(self, geometry=geometry, draft=draft)

    def with_head(self, directory: Path) -> LoadedModel:
        """This model with the head in `directory` in its pages: an EAGLE head, or a checkpoint's MTP layers.

        Raises what `load_eagle_weights` and `load_mtp_weights` raise.
        """
        packer = choose_packer(self.report.weights.layout, self.kernels, self.config.torch_dtype, self.device)
        target = HeadTarget.of(self.impl, len(self.layers), self.config.vocab_size, packer)
        is_eagle = is_eagle_head(directory)
        head = (load_eagle_weights(directory, target),) if is_eagle else load_mtp_weights(directory, target)
        tail_elements = sum(layer.hidden_size for layer in head)
        geometry = self.geometry.with_draft_layers(tuple(layer.cache_layer for layer in head), tail_elements)
        return replace(self, geometry=geometry, head=head)

    @property
    def kernel_name(self) -> str:
        """Level of the native kernels in use; on a CPU without them `NO_KERNELS`, else the device."""
        if self.kernels is not None:
            return self.kernels.level.value
        return NO_KERNELS if self.device == "cpu" else self.device

    def with_int8_pages(self) -> LoadedModel:
        """This model over pages of int8, its bits unchecked. Raises `UnsupportedModel` if it has none."""
        try:
            geometry = self.geometry.quantized()
        except ValueError as error:
            raise UnsupportedModel(f"no pages of int8: {error}. Use --kv-dtype auto") from error
        return replace(self, geometry=geometry, report=replace(self.report, verification=None))

    def decoder(self, storage: PageStorage) -> Decoder:
        """A decoder over `storage`. Raises `ValueError` for another geometry."""
        if storage.geometry != self.geometry:
            raise ValueError("the storage was made for another geometry")
        return make_decoder(self.impl, self.layers, storage, self.kernels, self.config.max_model_len)

    def drafting(self, storage: PageStorage) -> PageDrafts | None:
        """The draft model or head over the draft layers of `storage`; None if there is none."""
        if self.head:
            num_slots = storage.num_pages * storage.geometry.page_size
            parts = storage, self.sampler(), self.kernels, min(num_slots, self.config.max_model_len)
            if len(self.head) == 1:
                return EagleDrafts(self.head[0], *parts, self.config.vocab_size)
            return DepthDrafts(self.head, *parts, self.config.vocab_size)
        if self.draft is None:
            return None
        view = storage.draft_view()
        sizes = self.draft.config.vocab_size, self.config.vocab_size
        return DraftModel(self.draft.decoder(view), view, self.sampler(), *sizes)

    def sampler(self) -> SamplerBackend:
        """The sampler backend for its logits."""
        return TorchSampler() if self.kernels is None else NativeSampler(self.kernels)


def make_decoder(
    impl: ModelImpl,
    layers: Sequence[ObservedLayer],
    storage: PageStorage,
    kernels: Kernels | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """A decoder of `impl` over `storage`, with the best attention and operations that `kernels` or torch offer."""
    backend = choose_backend(layers, storage, kernels)
    if not isinstance(impl, LeanModel):
        return StockDecoder(impl, layers, storage, backend)
    num_slots = storage.num_pages * storage.geometry.page_size
    max_positions = num_slots if max_model_len is None else min(num_slots, max_model_len)
    return LeanDecoder(impl, layers, storage, max_positions, backend, choose_ops(storage, kernels))


def load_model(
    directory: Path,
    *,
    dtype: DtypeChoice = DtypeChoice.AUTO,
    page_size: int = 16,
    head_groups: int = 1,
    max_model_len: int | None = None,
    latent_pages: bool = True,
    device: str = "cpu",
    layout: WeightLayout = WeightLayout.AUTO,
    decoder: DecoderChoice = DecoderChoice.AUTO,
    kernels: KernelUse = KernelUse.AUTO,
    quantization: Quantization = Quantization.NONE,
    on_progress: OnProgress | None = None,
    allowed: frozenset[str] = TOKEN_EXACT,
    vision: bool = False,
) -> LoadedModel:
    """Loads and checks a Hugging Face causal language model. `vision`: of a vision-language model, with its tower.

    `latent_pages`: pages of models with multi-head latent attention keep the latent; otherwise every head's K and V.
    Raises `UnreadableModel` for an incomplete model directory, `UnsupportedModel` for a model that would give wrong
    tokens.
    """
    began = time.monotonic()
    config = read_config(
        directory, dtype=dtype, max_model_len=max_model_len, device=device, allowed=allowed, vision=vision
    )
    native = choose_kernels(kernels, device)
    if quantization is Quantization.INT8:
        require_int8_support(native, device)
    module, checkpoint_note, tower = _load(config, device, on_progress)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    layers = _observe(module, device, latent_pages)
    _set_attention(module, "eager")
    geometry = kv_geometry(layers, config.dtype, page_size, head_groups)
    reference = reference_logits(module, layers, config.vocab_size, page_size, device)
    image = _image_reference(module, config, tower, device)
    self_check = _SelfCheck(config, layers, geometry, reference, device, native, image)
    _set_attention(module, hf_hook.ATTENTION_NAME, latent_pages)
    self_check, impl, stock_note, result = _choose_kernels_and_impl(module, decoder, self_check)
    del module  # a packed lean implementation references none of it
    weights, quantized = WeightReport(WeightLayout.PLAIN, 0, "int8"), None
    if quantization is Quantization.INT8:
        quantized = quantize(impl, stock_note, self_check.choice, self_check.logits)
    else:
        weights, result = _pack(impl, layout, self_check, result)
    impl, memory = _on_huge_pages(impl)
    seconds = time.monotonic() - began
    report = LoadReport(
        seconds=seconds,
        num_parameters=num_parameters,
        checkpoint_note=checkpoint_note,
        stock_note=stock_note,
        kernel_note=self_check.choice.note,
        weights=weights,
        memory=memory,
        check=result,
        quantization=quantized,
    )
    return LoadedModel(config, geometry, layers, device, report, impl, self_check.choice.kernels, tower)


def _load(
    config: ModelConfig, device: str, on_progress: OnProgress | None
) -> tuple[torch.nn.Module, str, VisionTower | None]:
    """The stock text model, a note on its weights, and the vision tower of a model that is served with images."""
    if config.vision is None:
        return *load_weights(config, device, on_progress), None
    text, tower = load_vision_weights(config, device, on_progress)
    return text, f"with the vision tower of {config.model_type}", tower


def _image_reference(
    module: torch.nn.Module, config: ModelConfig, tower: VisionTower | None, device: str
) -> ImageLogits | None:
    """The reference of the self-check with an image; None for a model that is served on text only."""
    if tower is None or config.media is None or not isinstance(module, VisionTextModel):
        return None
    if tower.depth >= (num_layers := int(_text_config(module).num_hidden_layers)):
        raise UnsupportedModel(f"DeepStack rows for {tower.depth} layers of {num_layers} are not supported")
    return image_reference(module, config.vocab_size, tower.depth, config.media, device)


@dataclass(frozen=True, slots=True)
class _SelfCheck:
    """The checks that every implementation of a model has to pass."""

    config: ModelConfig
    layers: tuple[ObservedLayer, ...]
    geometry: KVGeometry
    reference: ReferenceLogits
    device: str
    choice: KernelChoice
    image: ImageLogits | None = None

    def check_logits(self, impl: ModelImpl) -> CheckResult:
        """Compares its logits with the stock model's. Raises `UnsupportedModel` if it does not run."""
        return _run_hooked(lambda: self._check_logits(self._factory(impl)))

    def _check_logits(self, make: Callable[[PageStorage], Decoder]) -> CheckResult:
        """The result on text, or with an image if that one fails."""
        result = check_logits(make, self.geometry, self.reference, self.device)
        if self.image is None or not result.passed:
            return result
        shown = check_image(make, self.geometry, self.image, self.device)
        return result if shown.passed else shown

    def logits(self, impl: ModelImpl) -> torch.Tensor:
        """Logits after every chunk of the prompts: [tokens, vocab_size], float32. Raises `UnsupportedModel`."""
        return _run_hooked(lambda: paged_logits(self._factory(impl), self.geometry, self.reference, self.device))[0]

    def check_pages(self, impl: ModelImpl, other: ModelImpl) -> CheckResult:
        """Compares the pages that two implementations write. Raises `UnsupportedModel`."""
        bodies = self._factory(impl), self._factory(other)
        return _run_hooked(lambda: check_pages(*bodies, self.geometry, self.reference, self.device))

    def _factory(self, impl: ModelImpl) -> Callable[[PageStorage], Decoder]:
        return lambda storage: make_decoder(impl, self.layers, storage, self.choice.kernels)


def _choose_kernels_and_impl(
    module: torch.nn.Module, choice: DecoderChoice, self_check: _SelfCheck
) -> tuple[_SelfCheck, ModelImpl, str, CheckResult]:
    """Calls `_choose_impl` with the kernels, and without them if nothing passes. Raises `UnsupportedModel`."""
    try:
        return self_check, *_choose_impl(module, choice, self_check)
    except UnsupportedModel as error:
        if self_check.choice.kernels is None:
            raise
        plain = replace(self_check, choice=KernelChoice(None, f"no native kernels: with them {error}"))
        return plain, *_choose_impl(module, choice, plain)


def _choose_impl(
    module: torch.nn.Module, choice: DecoderChoice, self_check: _SelfCheck
) -> tuple[ModelImpl, str, CheckResult]:
    """The implementation that passed, the reason if it is the stock one, and its result. Raises `UnsupportedModel`."""
    note = "asked for"
    if choice is not DecoderChoice.STOCK:
        try:
            lean, result = _make_lean(module, self_check)
            return lean, "", result
        except UnsupportedModel as error:
            if choice is DecoderChoice.LEAN:
                raise UnsupportedModel(f"no lean decoder: {error}. Use decoder auto or stock") from error
            note = str(error)
    result = self_check.check_logits(module)
    require_passed(result, self_check.config.model_type)
    return module, note, result


def _make_lean(module: torch.nn.Module, self_check: _SelfCheck) -> tuple[LeanModel, CheckResult]:
    """The lean implementation on the stock module's memory, and its result. Raises `UnsupportedModel`."""
    spec = lean_spec(_text_config(module).to_dict(), self_check.layers)
    if isinstance(spec, Unsupported):
        raise UnsupportedModel(spec.reason)
    lean = make_lean_model(module, spec)
    result, pages = self_check.check_logits(lean), self_check.check_pages(lean, module)
    for what, found in (("logits", result), ("pages", pages)):
        if not found.passed:
            raise UnsupportedModel(f"its {what} differ by {found.gap:.2g}, more than {found.bound:.2g}")
    return lean, result


def _observe(module: torch.nn.Module, device: str, latent_pages: bool) -> tuple[ObservedLayer, ...]:
    _set_attention(module, hf_hook.ATTENTION_NAME, latent_pages)
    return _run_hooked(lambda: observe_layers(module, int(_text_config(module).num_hidden_layers), device))


def _set_attention(module: Any, name: str, keeps_latents: bool = False) -> None:
    hf_hook.register()
    module.set_attn_implementation(name)
    keep_latents(module, keeps_latents)
    if _text_config(module)._attn_implementation != name:
        raise UnsupportedModel(f"{type(module).__name__} does not let its attention be replaced, so it cannot be paged")


def _text_config(module: Any) -> Any:
    return module.config.get_text_config()


def _pack(
    impl: ModelImpl, wanted: WeightLayout, self_check: _SelfCheck, plain: CheckResult
) -> tuple[WeightReport, CheckResult]:
    """Packs the matrices and checks again. Undoes it if the check fails. Returns the report and the valid check."""
    packer = choose_packer(wanted, self_check.choice.kernels, self_check.config.torch_dtype, self_check.device)
    if packer is None:
        cpu = torch.backends.cpu.get_cpu_capability()
        return WeightReport(
            WeightLayout.PLAIN, 0, f"{wanted.value}, {self_check.config.dtype} on {self_check.device} {cpu}"
        ), plain
    count = impl.pack(packer) if isinstance(impl, LeanModel) else pack_modules(impl, packer, projecting_linears(impl))
    try:
        result = self_check.check_logits(impl)
        problem = "" if result.passed else f"logits differ by {result.gap:.2g}"
    except UnsupportedModel as error:
        result, problem = plain, str(error)
    if not problem:
        return WeightReport(packer.layout, count, ""), result
    if isinstance(impl, LeanModel):
        impl.unpack()
    else:
        unpack_modules(impl)
    return WeightReport(WeightLayout.PLAIN, 0, f"not {packer.layout.value}: {problem}"), plain


def _on_huge_pages(impl: ModelImpl) -> tuple[ModelImpl, WeightMemory | None]:
    """The same weights on huge pages where the host has them, and the memory that they really lie in."""
    if isinstance(impl, LeanModel):
        impl = impl.to_huge_pages()
        return impl, measure_memory(impl.tensors())
    move_parameters(impl)
    return impl, measure_memory(module_tensors(impl))


def _run_hooked(run: Callable[[], T]) -> T:
    """Runs model code through the hook. Any error of it means that the model does not fit: `UnsupportedModel`."""
    try:
        return run()
    except (Broken, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"the model does not run on paged attention: {error!r}") from error
