"""Reads a model's config and refuses models that pages cannot hold, before the weights are loaded.

Called by `load_model` and by all that only needs the context length or the vocabulary. Refusals here follow from the
config; `baton.model.loading.self_check` finds what only shows when the model runs.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch

from baton.domain.media.span import MediaRules
from baton.model.cpu import has_bfloat16_arithmetic
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.allow_list import TOKEN_EXACT
from baton.model.loading.dequantize.methods import weight_format
from baton.model.loading.dequantize.plan import WeightFormat
from baton.model.loading.multimodal import MULTIMODAL, MultimodalSpec
from baton.model.vision.spec import VisionSpec, vision_spec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
POSITION_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
MAX_NESTING = 4
MAX_REASON_CHARS = 300


class DtypeChoice(enum.Enum):
    """Dtype of weights and cache.

    `AUTO` is bfloat16 on a GPU. On a CPU it is the checkpoint's own dtype, with two exceptions. float16 becomes
    bfloat16, since CPUs have no float16 arithmetic. bfloat16 becomes float32 where the CPU would emulate it several
    times slower.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model that may be served. `max_model_len` bounds prompt plus output; `dtype` is a torch dtype's name.

    `weight_format`: how its weights are quantised; None for plain ones. `multimodal`: the model that it is the text
    model of; None for a text model. `model_type` is then the multimodal one's. `vision` and `media`: of a model that is
    served with images, and what it asks of media spans.
    """

    directory: Path
    model_type: str
    max_model_len: int
    vocab_size: int
    dtype: str
    weight_format: WeightFormat | None = None
    multimodal: MultimodalSpec | None = None
    vision: VisionSpec | None = None
    media: MediaRules | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def read_config(
    directory: Path,
    *,
    dtype: DtypeChoice = DtypeChoice.AUTO,
    max_model_len: int | None = None,
    device: str = "cpu",
    allowed: frozenset[str] = TOKEN_EXACT,
    vision: bool = False,
) -> ModelConfig:
    """Reads and validates `config.json`. `max_model_len` may lower the model's own limit, never raise it.

    `vision`: the model is to be served with images.

    Raises `UnreadableModel` where there is no readable config, `UnsupportedModel` where the model may not be served.
    """
    raw = read_raw_config(directory)
    model_type = str(raw.get("model_type", ""))
    multimodal = MULTIMODAL.get(model_type)
    if model_type not in allowed and multimodal is None:
        raise UnsupportedModel(
            f"model type {model_type or 'unknown'!r} has not been seen to give the stock model's tokens on paged "
            "attention, so it is not served; use one of: " + ", ".join(sorted(allowed | MULTIMODAL.keys()))
        )
    quantized = weight_format(raw)
    seen = vision_spec(model_type) if vision else None
    if seen is not None and quantized is not None:
        raise UnsupportedModel("a quantised checkpoint is served on text only; use a plain one for images")
    whole = _whole_config(directory)
    config = _text_config(directory, whole, seen or multimodal)
    _refuse_what_pages_cannot_hold(raw, config.to_dict())
    return ModelConfig(
        directory=directory,
        model_type=model_type,
        max_model_len=_context_length(config, max_model_len),
        vocab_size=int(config.vocab_size),
        dtype=_resolve_dtype(dtype, raw, device),
        weight_format=quantized,
        multimodal=multimodal,
        vision=seen,
        media=None if seen is None else seen.rules(whole),
    )


def stock_config(directory: Path, multimodal: MultimodalSpec | None) -> PreTrainedConfig:
    """transformers' config of the text model in `directory`, or of the one inside `multimodal`.

    Raises `UnreadableModel` for values that transformers does not take, `UnsupportedModel` for another text model.
    """
    return _text_config(directory, _whole_config(directory), multimodal)


def _whole_config(directory: Path) -> Any:
    from transformers import AutoConfig  # slow to import, and not needed for shared weights

    with _readable(directory):
        return AutoConfig.from_pretrained(directory, local_files_only=True)


def _text_config(directory: Path, whole: Any, spec: MultimodalSpec | VisionSpec | None) -> PreTrainedConfig:
    from transformers import PreTrainedConfig

    with _readable(directory):
        config = whole.get_text_config() if spec is None else spec.text_config(whole)
    if not isinstance(config, PreTrainedConfig):
        raise UnreadableModel(f"{directory / 'config.json'} has a text_config that is no object")
    return config


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Turns errors of transformers over values of a config into `UnreadableModel`."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        why = shorten(str(error), MAX_REASON_CHARS)
        raise UnreadableModel(f"{directory / 'config.json'} is no config of transformers: {why}") from error


def text_model_type(directory: Path) -> str:
    """The type that `config.json` names for its text model; "" if it names none. Raises `UnreadableModel`."""
    raw = read_raw_config(directory)
    nested = raw.get("text_config")
    return str((nested if isinstance(nested, Mapping) else raw).get("model_type", ""))


def read_raw_config(directory: Path) -> dict[str, Any]:
    """The object in config.json. Raises `UnreadableModel`."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableModel(f"no model in {directory}: cannot read {path.name} ({error.strerror})") from error
    except ValueError as error:
        raise UnreadableModel(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UnreadableModel(f"{path} holds no object")
    return raw


def _refuse_what_pages_cannot_hold(raw: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises `UnsupportedModel` for properties that causal pages, computed chunk by chunk, would get wrong silently."""
    reasons = []
    if raw.get("is_encoder_decoder"):
        reasons.append("it is an encoder-decoder (only decoders have a paged prefix)")
    if config.get("attention_chunk_size"):
        reasons.append("attention_chunk_size is set (chunked attention lives in a mask that paging does not build)")
    if config.get("use_bidirectional_attention") in (True, "all"):
        reasons.append("its attention is bidirectional (a cached prefix would change with every token)")
    if foreign := sorted(set(config.get("layer_types") or ()) - ATTENTION_LAYER_TYPES):
        reasons.append(f"layers of type {', '.join(foreign)} keep a state that is not pages of keys and values")
    if ropes := sorted(set(_rope_types(config)) & POSITION_DEPENDENT_ROPE):
        reasons.append(f"rotary scaling {', '.join(ropes)} depends on the longest request in a batch")
    if reasons:
        raise UnsupportedModel("this model cannot be served: " + "; ".join(reasons) + ". Use another checkpoint.")


def _rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Every rotary type in the config; some families have a record for each layer type."""
    for key in ("rope_parameters", "rope_scaling"):
        yield from _named_types(config.get(key), MAX_NESTING)


def _named_types(value: object, depth: int) -> Iterator[str]:
    if not isinstance(value, Mapping) or depth == 0:
        return
    for key in ("rope_type", "type"):
        if isinstance(value.get(key), str):
            yield value[key]
    for inner in value.values():
        yield from _named_types(inner, depth - 1)


def _context_length(config: Any, wanted: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise UnsupportedModel("config.json names no max_position_embeddings, so the context length is unknown; add it")
    return bounded_context(limit, wanted)


def bounded_context(limit: int, wanted: int | None) -> int:
    """`wanted`, or the model's own `limit`. Raises `UnsupportedModel` for a number outside of it."""
    if wanted is None:
        return limit
    if not 1 <= wanted <= limit:
        raise UnsupportedModel(f"max_model_len {wanted} is outside [1, {limit}], the model's own limit; lower it")
    return wanted


def _resolve_dtype(choice: DtypeChoice, raw: Mapping[str, Any], device: str) -> str:
    if choice is not DtypeChoice.AUTO:
        return str(choice.value)
    nested = raw.get("text_config")
    configs = (raw, nested if isinstance(nested, Mapping) else {})
    names = [config.get(key) for config in configs for key in ("dtype", "torch_dtype")]
    stored = str(next(filter(None, names), "float32"))
    if stored not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(f"weights of type {stored} are not known here; choose dtype float32 or bfloat16")
    if device != "cpu":
        return "bfloat16"
    if stored == "float32":
        return stored
    return "bfloat16" if has_bfloat16_arithmetic() else "float32"
