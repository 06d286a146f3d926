"""What a weight file says besides its tensors: the model's config, its layers, its record, and what was checked.

All that `LoadedModel` needs, so that a worker that maps the file reads no checkpoint and runs no self-check again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import xxhash

from baton.kv.geometry import LayerGeometry
from baton.model.attention.base import Segment, plan_step
from baton.model.attention.layers import ObservedLayer, kv_geometry
from baton.model.decoders.lean_record import LeanRecord, NoRecord, record_model, restore_model
from baton.model.decoders.lean_weights import LeanModel
from baton.model.kernels.library import Kernels
from baton.model.loading.bit_check import check_bits
from baton.model.loading.config import ModelConfig
from baton.model.loading.loader import LoadedModel
from baton.model.loading.quantization import QuantizationReport
from baton.model.loading.report import LoadReport, WeightReport
from baton.model.loading.self_check import CheckResult, VerificationBits
from baton.model.sharing.weight_key import LoadOptions
from baton.model.smaps import measure_memory
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.weight_file.format import DamagedFile, WeightFile

NUM_PROOF_TOKENS = 4


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """The part of `ModelConfig` that outlives loading. `max_model_len`: the model's own limit."""

    model_type: str
    max_model_len: int
    vocab_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """An `ObservedLayer` whose pages have K and V of every head."""

    geometry: LayerGeometry
    num_heads: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class StoredReport:
    """What `LoadReport` says of the packer's checks."""

    num_parameters: int
    checkpoint_note: str
    kernel_note: str
    weights: WeightReport
    check: CheckResult
    quantization: QuantizationReport | None
    verification: VerificationBits


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Content of the manifest. `parts`: of the key; `logits`: `proof_digest` of the packer's private weights."""

    parts: dict[str, str]
    config: StoredConfig
    layers: tuple[StoredLayer, ...]
    model: LeanRecord
    report: StoredReport
    logits: str


def make_manifest(model: LoadedModel, parts: dict[str, str]) -> tuple[str, list[torch.Tensor]]:
    """The manifest of a loaded model as JSON, and the tensors of its file. `model` has the model's own context length.

    Raises `NoRecord` for a model that cannot be kept in a file.
    """
    if not isinstance(model.impl, LeanModel):
        raise NoRecord(f"the stock decoder serves the model ({model.report.stock_note})")
    record, tensors = record_model(model.impl)
    config, report = model.config, model.report
    manifest = WeightManifest(
        parts,
        StoredConfig(config.model_type, config.max_model_len, config.vocab_size, config.dtype),
        tuple(_stored_layer(layer) for layer in model.layers),
        record,
        StoredReport(
            report.num_parameters,
            report.checkpoint_note,
            report.kernel_note,
            report.weights,
            report.check,
            report.quantization,
            check_bits(model),
        ),
        proof_digest(model),
    )
    return msgspec.json.encode(manifest).decode(), tensors


def restore(
    directory: Path, file: WeightFile, parts: dict[str, str], options: LoadOptions, kernels: Kernels
) -> LoadedModel:
    """The model on the tensors of `file`, with the model's own context length.

    Raises `DamagedFile` for a file of another key, or whose weights do not give the bits of the packer's logits.
    """
    try:
        manifest = msgspec.json.decode(file.manifest, type=WeightManifest)
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its manifest is not readable: {error}") from error
    if manifest.parts != parts:
        different = sorted(name for name in parts if manifest.parts.get(name) != parts[name])
        raise DamagedFile(f"it was made with other {', '.join(different) or 'parts'}")
    config, stored = manifest.config, manifest.report
    layers = tuple(_observed(layer) for layer in manifest.layers)
    impl = restore_model(manifest.model, file.tensors, kernels)
    report = LoadReport(
        seconds=0.0,
        num_parameters=stored.num_parameters,
        checkpoint_note=stored.checkpoint_note,
        stock_note="",
        kernel_note=stored.kernel_note,
        weights=stored.weights,
        memory=None,
        check=stored.check,
        quantization=stored.quantization,
        verification=stored.verification,
    )
    model = LoadedModel(
        config=ModelConfig(directory, config.model_type, config.max_model_len, config.vocab_size, config.dtype),
        geometry=kv_geometry(layers, config.dtype, options.page_size, options.head_groups),
        layers=layers,
        device=options.device,
        report=report,
        impl=impl,
        kernels=kernels,
    )
    if proof_digest(model) != manifest.logits:
        raise DamagedFile("its weights give other logits than the packer's")
    return replace(model, report=replace(report, memory=measure_memory(impl.tensors())))


def proof_digest(model: LoadedModel) -> str:
    """Digest of the bits of the logits of a few tokens: [tokens, vocab_size]. One short step."""
    num_tokens = min(NUM_PROOF_TOKENS, model.geometry.page_size, model.config.vocab_size)
    decoder = model.decoder(PageStorage.allocate(model.geometry, 2, model.device))
    device = torch.device(model.device)
    tokens, positions = (int64_tensor(list(range(num_tokens)), device) for _ in range(2))
    step = plan_step([Segment(0, 0, num_tokens, [1])], model.geometry.page_size, device)
    logits = decoder.forward(tokens, positions, step, positions)
    return xxhash.xxh3_128_hexdigest(logits.float().contiguous().numpy().tobytes())


def _stored_layer(layer: ObservedLayer) -> StoredLayer:
    if not isinstance(layer.geometry, LayerGeometry):
        raise NoRecord("its pages keep latents")
    own = (layer.num_heads, layer.scale, layer.window, layer.softcap, layer.has_sinks)
    return StoredLayer(layer.geometry, *own)


def _observed(layer: StoredLayer) -> ObservedLayer:
    own = (layer.num_heads, layer.scale, layer.window, layer.softcap, layer.has_sinks)
    return ObservedLayer(layer.geometry, *own)
