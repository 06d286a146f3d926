"""The text model of a multimodal checkpoint gives the multimodal model's own tokens and logits on text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedConfig

from baton.domain.request import SamplingParams
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.config import DtypeChoice, read_config
from baton.model.loading.hf_weights import load_weights
from baton.model.loading.loader import load_model
from baton.model.loading.multimodal import MULTIMODAL
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, PAGE_SIZE, make_prompts, paged_scheduler
from tests.tiny_models import WINDOW, small_shape
from tests.unit.model.dequantize.test_fp8 import BLOCKS, in_blocks

Tensors = dict[str, torch.Tensor]

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 16}
CLIP = {**VISION, "model_type": "clip_vision_model"}
INTERN = {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}
QWEN2_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
GEMMA: dict[str, Any] = {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}
DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": [0]}


def text(model_type: str = "", **more: Any) -> dict[str, Any]:
    named = {"model_type": model_type} if model_type else {}
    return small_shape(num_hidden_layers=2, **named, **more)


def config_of(family: str, vision: dict[str, Any], nested: dict[str, Any], **more: Any) -> PreTrainedConfig:
    """A config of transformers' class for `family`."""
    config = getattr(transformers, f"{family}Config")(text_config=nested, vision_config=vision, **more)
    assert isinstance(config, PreTrainedConfig)
    return config


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": lambda: config_of("Gemma3", VISION, text(**GEMMA), mm_tokens_per_image=1),
    "idefics3": lambda: config_of("Idefics3", VISION, text("llama")),
    "internvl-qwen2": lambda: config_of("InternVL", INTERN, text("qwen2")),
    "internvl-qwen3": lambda: config_of("InternVL", INTERN, text("qwen3")),
    "llava-llama": lambda: config_of("Llava", CLIP, text("llama")),
    "llava-mistral": lambda: config_of("Llava", CLIP, text("mistral")),
    "llava-qwen2": lambda: config_of("Llava", CLIP, text("qwen2")),
    "llava_next-llama": lambda: config_of("LlavaNext", CLIP, text("llama")),
    "llava_next-mistral": lambda: config_of("LlavaNext", CLIP, text("mistral")),
    "mistral3-mistral": lambda: config_of("Mistral3", PIXTRAL, text("mistral")),
    "mistral3-ministral3": lambda: config_of("Mistral3", PIXTRAL, text("ministral3")),
    "qwen2_vl": lambda: config_of("Qwen2VL", QWEN2_VISION, text(rope_parameters=MROPE)),
    "qwen2_5_vl": lambda: config_of("Qwen2_5_VL", QWEN_VISION, text(rope_parameters=MROPE)),
    "qwen3_vl": lambda: config_of("Qwen3VL", QWEN_VISION | DEEPSTACK, text(rope_parameters=MROPE)),
    "smolvlm": lambda: config_of("SmolVLM", VISION, text("llama")),
}


def save(name: str, directory: Path) -> Any:
    """Writes a random model and returns it."""
    return save_random(CONFIGS[name](), directory)


def save_random(config: PreTrainedConfig, directory: Path) -> Any:
    """Writes a random model of `config` and returns it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.08
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(directory)
    return model


def own_tokens(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0)
    batches = [torch.tensor([prompt]) for prompt in prompts]
    outputs = [model.generate(ids, attention_mask=torch.ones_like(ids)) for ids in batches]
    return [output[0, ids.shape[1] :].tolist() for output, ids in zip(outputs, batches, strict=True)]


def served_tokens(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE)
    assert f"text model of {model.config.model_type}: " in model.report.checkpoint_note
    return paged_scheduler(model, seed=5).generate(prompts, NUM_NEW_TOKENS, SamplingParams(temperature=0.0))


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logits_are_the_multimodal_models_own(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    prompts = make_prompts(PAGE_SIZE)[2::3]
    alone, note = load_weights(read_config(tmp_path))
    ids = torch.tensor([prompts[-1]])
    with torch.inference_mode():
        ours, own = alone(input_ids=ids, use_cache=False).logits, whole(input_ids=ids, use_cache=False).logits
    assert (ours - own).abs().max() < 1e-4 * own.std()
    assert not note.endswith(": 0 tensors not read")
    assert sum(p.numel() for p in alone.parameters()) < sum(p.numel() for p in whole.parameters())
    assert served_tokens(tmp_path, prompts) == own_tokens(whole, prompts)


def test_every_pair_in_the_table_has_a_model_here() -> None:
    seen = {
        (config.model_type, config.get_text_config().model_type) for config in (make() for make in CONFIGS.values())
    }
    assert seen == {(spec.model_type, text_type) for spec in MULTIMODAL.values() for text_type in spec.text_types}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llava")
    save("llava-llama", directory)
    return directory


def copy_of(source: Path, directory: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    tensors = change(load_file(source / "model.safetensors"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return directory


def parameters(directory: Path) -> Tensors:
    return dict(load_weights(read_config(directory))[0].named_parameters())


def newer_name(name: str) -> str:
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    return f"model.{name}"


def test_the_names_of_newer_checkpoints_are_known(llava: Path, tmp_path: Path) -> None:
    copy_of(llava, tmp_path, lambda tensors: {newer_name(name): tensor for name, tensor in tensors.items()})
    older, newer = parameters(llava), parameters(tmp_path)
    assert older.keys() == newer.keys()
    assert all(torch.equal(older[name], newer[name]) for name in older)


def test_a_config_in_the_older_form_of_qwen2_vl_is_read(tmp_path: Path) -> None:
    """Its text fields are not nested, and its rotary type has a name of its own."""
    whole = save("qwen2_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= config.pop("text_config") | {"model_type": "qwen2_vl", "rope_theta": 1e4}
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = make_prompts(PAGE_SIZE)[2::3]
    assert served_tokens(tmp_path, prompts) == own_tokens(whole, prompts)


def test_a_config_in_the_published_form_of_gemma3_is_read(tmp_path: Path) -> None:
    """It gives one rotary scaling for layers without a window, and no dtype, type or lengths of its text model."""
    save("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in ("rope_parameters", "layer_types", "tie_word_embeddings", "model_type", "max_position_embeddings"):
        config["text_config"].pop(field, None)
    config["text_config"]["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert whole.config.text_config.rope_parameters["full_attention"]["factor"] == 8.0
    prompts = make_prompts(PAGE_SIZE)[2::3]
    assert served_tokens(tmp_path, prompts) == own_tokens(whole, prompts)


def test_a_stored_head_beats_the_tie_that_a_config_leaves_out(tmp_path: Path) -> None:
    """Mistral Small 3 stores its head, and its config does not say that the embedding is another matrix."""
    save("mistral3-mistral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["language_model.model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)) * 0.08
    tensors["language_model.lm_head.weight"] = noise
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert whole.config.tie_word_embeddings
    assert torch.equal(whole.lm_head.weight, noise)
    prompts = make_prompts(PAGE_SIZE)[2::3]
    assert served_tokens(tmp_path, prompts) == own_tokens(whole, prompts)


def test_the_dtype_may_be_the_text_models(llava: Path, tmp_path: Path) -> None:
    nested = json.loads((llava / "config.json").read_text())["text_config"] | {"dtype": "int8"}
    with pytest.raises(UnsupportedModel, match="weights of type int8"):
        read_config(copy_of(llava, tmp_path, lambda tensors: tensors, dtype=None, text_config=nested))


def test_a_quantised_text_model_is_dequantised(llava: Path, tmp_path: Path) -> None:
    meant: Tensors = {}

    def pack(tensors: Tensors) -> Tensors:
        packed: Tensors = {}
        for name, tensor in tensors.items():
            stored, meant[name] = in_blocks(name, tensor) or ({name: tensor}, tensor)
            packed |= stored
        return packed

    ours = parameters(copy_of(llava, tmp_path, pack, quantization_config=BLOCKS))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(ours[name], meant[f"language_model.{name}"])
    assert not torch.equal(ours[name], parameters(llava)[name])


def test_other_text_models_are_refused(llava: Path, tmp_path: Path) -> None:
    other = copy_of(llava, tmp_path, lambda tensors: tensors, text_config=text("gemma2"))
    with pytest.raises(UnsupportedModel, match=r"^text model 'gemma2' in llava is not supported"):
        read_config(other)


@pytest.mark.parametrize("model_type", ["paligemma", "mllama", "qwen2_5_omni", "aya_vision"])
def test_other_multimodal_types_are_refused(llava: Path, tmp_path: Path, model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^model type '{model_type}' has not been seen.*llava"):
        read_config(copy_of(llava, tmp_path, lambda tensors: tensors, model_type=model_type))


def test_a_tensor_of_no_known_part_is_refused(llava: Path, tmp_path: Path) -> None:
    copy_of(llava, tmp_path, lambda tensors: tensors | {"audio_tower.weight": torch.ones(2, 2)})
    with pytest.raises(UnsupportedModel, match=r"^tensor audio_tower\.weight is of no part of llava that is known"):
        parameters(tmp_path)


def test_a_text_model_that_is_stored_twice_is_refused(llava: Path, tmp_path: Path) -> None:
    copy_of(llava, tmp_path, lambda tensors: tensors | {"lm_head.weight": torch.ones(2, 2)})
    with pytest.raises(UnreadableModel, match="stored twice"):
        parameters(tmp_path)


def test_a_missing_text_weight_is_told(llava: Path, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> Tensors:
        del tensors["language_model.model.norm.weight"]
        return tensors

    with pytest.raises(UnreadableModel, match=r"1 tensors are missing from .*, first model.norm.weight"):
        parameters(copy_of(llava, tmp_path, drop))
