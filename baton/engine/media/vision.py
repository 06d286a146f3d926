"""Image processor, store and encoder of a prefill worker or an encode worker. Built once, when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.domain.media.span import MediaRules
from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.encoder import Images, MediaEncoder
from baton.engine.media.store import MediaStore
from baton.model.errors import UnsupportedModel
from baton.model.loading.config import read_config, read_raw_config
from baton.model.loading.loader import LoadedModel
from baton.model.vision.image_processor import ImageProcessor
from baton.model.vision.spec import VISION
from baton.settings.choices import QuantizationKind, VisionKind
from baton.settings.groups import WorkerSettings
from baton.settings.processor_digest import processor_digest
from baton.telemetry.logs import get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class EngineVision:
    """`digest`: of the image processor; `fingerprint`: of all that an embedding depends on beside the image.

    `encoder` None: the worker has no tower, and takes embeddings from encode workers.
    """

    processor: ImageProcessor
    digest: str
    fingerprint: str
    format: EmbeddingFormat
    store: Images
    encoder: MediaEncoder | None


def media_rules(settings: WorkerSettings, directory: Path) -> MediaRules | None:
    """Rules of the model in `directory` for media spans; None if it is served on text only.

    Costs text models nothing. Raises `UnsupportedModel` for a model that is required to be served with images and
    cannot.
    """
    if settings.vision is VisionKind.OFF or (settings.vision is VisionKind.AUTO and not _may_see(directory)):
        return None
    try:
        if settings.quantization is not QuantizationKind.NONE:
            raise UnsupportedModel("weights are rounded to int8; use --quantization none for images")
        if not processor_digest(directory):
            raise UnsupportedModel("it has no preprocessor_config.json")
        return read_config(directory, vision=True).media
    except UnsupportedModel as error:
        if settings.vision is not VisionKind.AUTO:
            raise
        log.info("images_not_served", why=str(error))
        return None


def engine_vision(
    directory: Path, model: LoadedModel, root: str, max_bytes: int, kind: VisionKind = VisionKind.LOCAL
) -> EngineVision | None:
    """Builds what encodes images for `model`; None if it was loaded without a tower. `root`: digest of its weights.

    `max_bytes`: of the images that are held. `kind` REMOTE: the tower is not kept. Raises `UnsupportedModel`.
    """
    if model.tower is None or model.config.vision is None:
        return None
    processor, digest = ImageProcessor(directory, model.config.vision), processor_digest(directory)
    format = EmbeddingFormat(model.tower.hidden_size, model.tower.depth, model.config.dtype)
    fingerprint = format.fingerprint(root, digest)
    store: Images = MediaStore(max_bytes)
    encoder = None if kind is VisionKind.REMOTE else MediaEncoder(model.tower, store)
    log.info("images_served", processor=digest, vision=fingerprint, has_tower=encoder is not None)
    return EngineVision(processor, digest, fingerprint, format, store, encoder)


def _may_see(directory: Path) -> bool:
    """True for a type that is served with images. Raises `UnreadableModel`."""
    return read_raw_config(directory).get("model_type") in VISION
