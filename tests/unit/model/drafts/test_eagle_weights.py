"""Published heads load by name; what does not fit or is not understood is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.model.decoders.capture import CaptureSpec
from baton.model.drafts.eagle_weights import EagleWeights, load_eagle_weights
from baton.model.drafts.head_files import is_eagle_head
from baton.model.drafts.head_reader import HeadTarget
from baton.model.errors import UnreadableModel, UnsupportedModel
from tests.tiny_models import VOCAB_SIZE, save_random_model
from tests.unit.model.drafts.tiny_heads import HIDDEN, INNER, random_head, save_head

TARGET = HeadTarget(torch.zeros(VOCAB_SIZE, HIDDEN), lambda hidden: hidden @ torch.ones(HIDDEN, 3), 3, VOCAB_SIZE, None)


def test_both_kinds_load_by_their_published_names(tmp_path: Path) -> None:
    for kind in ("eagle", "eagle3"):
        tensors = random_head(kind, num_drafted_ids=100)
        directory = save_head(tensors, tmp_path / kind)
        assert is_eagle_head(directory)
        head = load_eagle_weights(directory, TARGET)
        assert (head.name, head.hidden_size) == (kind, HIDDEN)
        torch.testing.assert_close(head.fc(torch.eye(2 * HIDDEN)).T[:, 0] - bias(tensors), tensors["fc.weight"][:, 0])
        assert (head.token_ids is None) == (kind == "eagle")
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        assert load_eagle_weights(save_head(tensors, tmp_path / "nested"), TARGET).name == kind


def bias(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors.get("fc.bias", torch.zeros(HIDDEN))


def test_a_model_is_no_head(tmp_path: Path) -> None:
    assert not is_eagle_head(save_random_model("llama", tmp_path))
    assert not is_eagle_head(tmp_path / "empty")


def loaded(tmp_path: Path, kind: str, target: HeadTarget = TARGET, **config: Any) -> EagleWeights:
    return load_eagle_weights(save_head(random_head(kind), tmp_path, **config), target)


def test_eagle3_reads_the_published_layers_unless_its_config_names_others(tmp_path: Path) -> None:
    assert loaded(tmp_path, "eagle3").capture == CaptureSpec((1, 2)), "the output of layers 0 and 1"
    assert loaded(tmp_path, "eagle").capture == CaptureSpec(final=True)
    tensors = random_head("eagle3") | {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)}
    directory = save_head(tensors, tmp_path, eagle_config=None)
    target = HeadTarget(TARGET.embedding, TARGET.output, 32, VOCAB_SIZE, None)
    assert load_eagle_weights(directory, target).capture == CaptureSpec((2, 16, 29))
    with pytest.raises(UnsupportedModel, match="other layers"):
        load_eagle_weights(directory, HeadTarget(TARGET.embedding, TARGET.output, 2, VOCAB_SIZE, None))
    with pytest.raises(UnsupportedModel, match="there are 3 layers, and it reads after 3"):
        loaded(tmp_path, "eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2]})


def test_a_head_without_an_output_head_of_its_own_uses_the_targets(tmp_path: Path) -> None:
    tensors = random_head("eagle3")
    del tensors["lm_head.weight"]
    head = load_eagle_weights(save_head(tensors, tmp_path), TARGET)
    assert head.output(torch.ones(1, HIDDEN)).tolist() == [[HIDDEN] * 3]
    assert head.token_ids is None


Change = Callable[[dict[str, torch.Tensor]], object]
WRONG: dict[str, tuple[str, Change, type[Exception]]] = {
    "lacks 'midlayer.self_attn.o_proj.weight'": (
        "eagle", lambda t: t.pop("layers.0.self_attn.o_proj.weight"), UnreadableModel,
    ),
    r"fc.weight is \(64, 192\)": (
        "eagle3", lambda t: t.update({"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)}), UnsupportedModel,
    ),
    "midlayer.self_attn.q_norm.weight, which is not computed": (
        "eagle", lambda t: t.update({"layers.0.self_attn.q_norm.weight": torch.ones(16)}), UnsupportedModel,
    ),
    "layers.1.mlp.down_proj.weight, which is not computed": (
        "eagle", lambda t: t.update({"layers.1.mlp.down_proj.weight": torch.ones(HIDDEN, INNER)}), UnsupportedModel,
    ),
    "d2t does not name tokens": (
        "eagle3", lambda t: t.update({"d2t": torch.full((VOCAB_SIZE,), 1)}), UnsupportedModel,
    ),
    "only some of": (
        "eagle", lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(HIDDEN)}), UnsupportedModel,
    ),
    r"fc.bias is \(3,\)": (
        "eagle3", lambda t: t.update({"fc.bias": torch.zeros(3)}), UnsupportedModel,
    ),
    r"lm_head.weight is \(\d+, 3\)": (
        "eagle3", lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB_SIZE, 3)}), UnsupportedModel,
    ),
    r"lm_head.weight is \(5, 64\)": (
        "eagle3", lambda t: t.update({"lm_head.weight": torch.zeros(5, HIDDEN)}), UnsupportedModel,
    ),
    "embeddings are": (
        "eagle3", lambda t: t.update({"embed_tokens.weight": torch.zeros(7, HIDDEN)}), UnsupportedModel,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, message: str) -> None:
    kind, change, error = WRONG[message]
    tensors = random_head(kind)
    change(tensors)
    with pytest.raises(error, match=message):
        load_eagle_weights(save_head(tensors, tmp_path), TARGET)


def test_files_that_hold_no_head_are_refused(tmp_path: Path) -> None:
    directory = save_head(random_head("eagle"), tmp_path / "a")
    (directory / "model.safetensors").write_bytes(b"cut")
    for read in (is_eagle_head, lambda directory: load_eagle_weights(directory, TARGET)):
        with pytest.raises(UnreadableModel, match="cannot be read"):
            read(directory)
    directory = save_head(random_head("eagle"), tmp_path / "b")
    (directory / "config.json").write_text("{}")
    with pytest.raises(UnreadableModel, match="no hidden_size"):
        load_eagle_weights(directory, TARGET)
    for value in ("2", [None], None):
        with pytest.raises(UnreadableModel, match="the head's num_attention_heads is"):
            loaded(tmp_path / "d", "eagle", num_attention_heads=value)
    for ids in ("2,16", [None]):
        with pytest.raises(UnsupportedModel, match="reads other layers"):
            loaded(tmp_path / "e", "eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    for config, words in (({"hidden_act": "relu"}, "activation is relu"), ({"hidden_size": 32}, "other hidden states")):
        with pytest.raises(UnsupportedModel, match=words):
            loaded(tmp_path / "c", "eagle", **config)
