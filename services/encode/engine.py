"""Builds what an encode worker runs on: the vision tower, the image processor and the store. Called once, at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.engine.build import resolve_device
from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.encoder import MediaEncoder
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.store import MediaStore
from baton.model.cpu import configure_threads
from baton.model.errors import UnsupportedModel
from baton.model.loading.config import DtypeChoice, ModelConfig, read_config
from baton.model.loading.hf_weights import load_tower
from baton.model.loading.identity import checkpoint_root
from baton.model.vision.image_processor import ImageProcessor, Inputs
from baton.services.encode.settings import EncodeSettings
from baton.settings.groups import MIB
from baton.settings.model_source import resolve_model
from baton.settings.processor_digest import processor_digest
from baton.settings.text_digest import text_digest
from baton.telemetry.logs import get_logger
from baton.telemetry.progress import loading_progress

log = get_logger()


@dataclass(frozen=True, slots=True)
class EncodeEngine:
    """`digest`: of the image processor. `fingerprint`: of the embeddings. `text_digest`: as other workers announce."""

    config: ModelConfig
    device: str
    processor: ImageProcessor
    digest: str
    format: EmbeddingFormat
    fingerprint: str
    text_digest: str
    store: MediaStore[Inputs, ExportedEmbedding]
    encoder: MediaEncoder


def build_engine(settings: EncodeSettings) -> EncodeEngine:
    """Loads the tower. Raises `SettingsError`, `UnreadableModel` or `UnsupportedModel`."""
    configure_threads(settings.threads)
    directory, device = resolve_model(settings.model), resolve_device(settings.device)
    config = read_config(directory, dtype=DtypeChoice(settings.dtype.value), device=device, vision=True)
    processor, digest = _processor(directory, config)
    root = checkpoint_root(directory)
    with loading_progress(settings.model) as on_progress:
        tower = load_tower(config, device, on_progress)
    format = EmbeddingFormat(tower.hidden_size, tower.depth, config.dtype)
    store: MediaStore[Inputs, ExportedEmbedding] = MediaStore(settings.media_cache_mib * MIB)
    encoder = MediaEncoder(tower, store, format.to_bytes)
    fingerprint, text = format.fingerprint(root, digest), text_digest(directory, settings.chat_template)
    log.info("tower_ready", model_type=config.model_type, dtype=config.dtype, device=device, vision=fingerprint)
    return EncodeEngine(config, device, processor, digest, format, fingerprint, text, store, encoder)


def _processor(directory: Path, config: ModelConfig) -> tuple[ImageProcessor, str]:
    """The image processor, and the digest of its files."""
    assert config.vision is not None
    digest = processor_digest(directory)
    if not digest:
        raise UnsupportedModel("it has no preprocessor_config.json, so its images cannot be prepared")
    return ImageProcessor(directory, config.vision), digest
