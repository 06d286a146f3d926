"""Text models inside multimodal checkpoints: which config and which weights are theirs. Called by `read_config` and
`load_weights`.

Only types and text models in the table are served: for each of them a test compares tokens and logits with the
multimodal model's own. A text model with rotary positions in three parts (M-RoPE, arXiv 2409.12191) is the plain one,
since the parts of a text's position are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.model.errors import UnreadableModel, UnsupportedModel

M_ROPE_FIELDS = ("mrope_section", "mrope_interleaved")
NESTED_TEXT = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True, slots=True)
class MultimodalSpec:
    """A multimodal model type. All prefixes are those of stored tensors.

    - `text_types`: model types that its `text_config` may have, with the type that computes each of them.
    - `text_prefixes`: where the text model's tensors are, with the prefix that its own type gives them.
    - `other_prefixes`: tensors of the other parts, which are not loaded. They come before `text_prefixes`.
    """

    model_type: str
    text_types: Mapping[str, str]
    text_prefixes: tuple[tuple[str, str], ...]
    other_prefixes: tuple[str, ...]

    def text_config(self, config: Any) -> Any:
        """The config of the text model alone, from transformers' config of the whole. Raises `UnsupportedModel`."""
        from transformers import CONFIG_MAPPING  # slow to import, and not needed for shared weights

        nested = config.get_text_config()
        if nested.model_type not in self.text_types:
            raise UnsupportedModel(
                f"text model {nested.model_type!r} in {self.model_type} is not supported; supported: "
                + ", ".join(sorted(self.text_types))
            )
        fields = nested.to_dict()
        del fields["model_type"]
        rope = fields.get("rope_parameters") or {}
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in M_ROPE_FIELDS}
        fields["tie_word_embeddings"] = config.tie_word_embeddings  # the whole has the head
        return CONFIG_MAPPING[self.text_types[nested.model_type]](**fields)

    def text_names(self, stored: Iterable[str]) -> dict[str, str]:
        """The text model's tensors among `stored`, with the names that its own type gives them.

        Raises `UnsupportedModel` for a tensor of no known part, `UnreadableModel` for two of one name.
        """
        names: dict[str, str] = {}
        for name in sorted(stored):
            if name.startswith(self.other_prefixes):
                continue
            for prefix, replacement in self.text_prefixes:
                if name.startswith(prefix):
                    names[name] = replacement + name.removeprefix(prefix)
                    break
            else:
                raise UnsupportedModel(f"tensor {name} is of no part of {self.model_type} that is known")
        if len(set(names.values())) < len(names):
            raise UnreadableModel(f"some weights of the text model in {self.model_type} are stored twice")
        return names


def _same(*model_types: str) -> dict[str, str]:
    return {model_type: model_type for model_type in model_types}


def _qwen(model_type: str, text_type: str) -> MultimodalSpec:
    prefixes = (*NESTED_TEXT, ("model.", "model."))
    return MultimodalSpec(model_type, {f"{model_type}_text": text_type}, prefixes, ("visual.", "model.visual."))


def _idefics(model_type: str) -> MultimodalSpec:
    prefixes = (("model.text_model.", "model."), ("lm_head.", "lm_head."))
    return MultimodalSpec(model_type, _same("llama"), prefixes, ("model.vision_model.", "model.connector."))


MULTIMODAL: Mapping[str, MultimodalSpec] = {
    spec.model_type: spec
    for spec in (
        MultimodalSpec("gemma3", _same("gemma3_text"), NESTED_TEXT, VISION),
        _idefics("idefics3"),
        MultimodalSpec("internvl", _same("qwen2", "qwen3"), NESTED_TEXT, VISION),
        MultimodalSpec("llava", _same("llama", "mistral", "qwen2"), NESTED_TEXT, VISION),
        MultimodalSpec(
            "llava_next", _same("llama", "mistral"), NESTED_TEXT, (*VISION, "image_newline", "model.image_newline")
        ),
        MultimodalSpec("mistral3", _same("mistral", "ministral3"), NESTED_TEXT, VISION),
        _qwen("qwen2_vl", "qwen2"),
        _qwen("qwen2_5_vl", "qwen2"),
        _qwen("qwen3_vl", "qwen3"),
        _idefics("smolvlm"),
    )
}
