"""MTP layers load out of a checkpoint by their published names; what is not computed is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.decoders.capture import CaptureSpec
from baton.model.drafts.eagle_weights import HeadKind
from baton.model.drafts.head_files import is_eagle_head, is_head
from baton.model.drafts.head_reader import HeadTarget
from baton.model.drafts.mtp_weights import load_mtp_weights
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.loader import load_model
from tests.tiny_models import VOCAB_SIZE, save_random_model
from tests.unit.model.drafts.tiny_heads import HIDDEN, random_head, save_head

TARGET = HeadTarget(torch.zeros(VOCAB_SIZE, HIDDEN), lambda hidden: hidden, 3, VOCAB_SIZE, None)
LAYER = "model.mtp_layers.0"


def test_a_layer_is_found_among_the_tensors_of_its_checkpoint(tmp_path: Path) -> None:
    """The same directory is the model and what drafts for it."""
    directory = save_random_model("qwen2", tmp_path)
    assert not is_head(directory, directory)
    file = directory / "model.safetensors"
    save_file(load_file(file) | random_head("mtp"), file, {"format": "pt"})
    assert is_head(directory, directory)
    assert not is_eagle_head(directory)
    model = load_model(directory, page_size=4)
    with_layer = model.with_head(directory)
    (head,) = with_layer.head
    assert (head.kind, head.capture) == (HeadKind.MTP, CaptureSpec(final=True))
    assert len(with_layer.geometry.group.draft_layers) == 1
    assert with_layer.geometry.group.tail_elements == HIDDEN


Change = Callable[[dict[str, torch.Tensor]], object]
WRONG: dict[str, tuple[Change, type[Exception]]] = {
    "lack 'model.mtp_layers.0.self_attn.o_proj.weight'": (
        lambda t: t.pop(f"{LAYER}.self_attn.o_proj.weight"), UnreadableModel,
    ),
    "mlp.experts.0.up_proj.weight, which is not computed": (
        lambda t: t.update({f"{LAYER}.mlp.experts.0.up_proj.weight": torch.ones(2)}), UnsupportedModel,
    ),
    "q_proj.weight_scale_inv, which is not computed": (
        lambda t: t.update({f"{LAYER}.self_attn.q_proj.weight_scale_inv": torch.ones(2)}), UnsupportedModel,
    ),
    "lack layer 1": (lambda t: t.update({"model.mtp_layers.2.x": torch.ones(2)}), UnreadableModel),
    r"lack 'model.mtp_layers.1.\w+.weight'": (
        lambda t: t.update({"model.mtp_layers.1.input_proj.weight": torch.ones(HIDDEN, 2 * HIDDEN)}), UnreadableModel,
    ),
    r"input_proj.weight is \(64, 64\)": (
        lambda t: t.update({f"{LAYER}.input_proj.weight": torch.zeros(HIDDEN, HIDDEN)}), UnsupportedModel,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_a_layer_that_does_not_fit_is_refused(tmp_path: Path, message: str) -> None:
    change, error = WRONG[message]
    tensors = random_head("mtp")
    change(tensors)
    with pytest.raises(error, match=message):
        load_mtp_weights(save_head(tensors, tmp_path), TARGET)


def test_other_states_and_rotations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="reads states of 32"):
        load_mtp_weights(save_head(random_head("mtp"), tmp_path, hidden_size=32), TARGET)
    with pytest.raises(UnsupportedModel, match="rotates a part of each head"):
        load_mtp_weights(save_head(random_head("mtp"), tmp_path, partial_rotary_factor=0.5), TARGET)
    with pytest.raises(UnsupportedModel, match="has a sliding window"):
        load_mtp_weights(save_head(random_head("mtp"), tmp_path, use_sliding_window=True), TARGET)
    load_mtp_weights(save_head(random_head("mtp"), tmp_path, partial_rotary_factor=None), TARGET)


@pytest.mark.parametrize("name", ["model.layers.46.eh_proj.weight", "mtp.fc.weight", "model.mtp_block.0.mlp.x"])
def test_layouts_that_are_not_computed_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """DeepSeek's and GLM's, with experts; Qwen3-Next's; ERNIE's. Another model with such layers may draft."""
    directory = save_head({name: torch.ones(2)}, tmp_path / "a")
    with pytest.raises(UnsupportedModel, match=f"MTP layers with a tensor {name} are not computed here"):
        is_head(directory, tmp_path / "b" / ".." / "a")
    assert not is_head(directory, tmp_path)


def test_another_model_with_mtp_layers_is_a_draft_model(tmp_path: Path) -> None:
    directory = save_head(random_head("mtp"), tmp_path / "a")
    assert is_head(directory, directory)
    assert not is_head(directory, tmp_path)
