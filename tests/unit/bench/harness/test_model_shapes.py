"""A shape's numbers equal those of its model, and a worker loads the saved directory."""

import json

import pytest
import torch
import transformers

from baton.model.loading.loader import load_model
from bench.harness.model_shapes import SHAPES, ModelShape
from bench.harness.random_models import config_of, make_tokenizer, save_random_model

SMALL = ModelShape("qwen2", 300, 32, 48, 2, 4, 2, 8, 256, 1e4)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shapes_weights_are_its_models(name):
    shape = SHAPES[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(shape))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    head = linears.pop("lm_head")
    assert sum(linear.weight.numel() for linear in linears.values()) == shape.num_layer_weights
    assert head.weight.numel() == shape.num_head_weights
    assert head.weight is model.get_input_embeddings().weight
    assert model.config.max_position_embeddings == shape.max_positions


def test_a_prompts_operations_are_counted_one_by_one():
    counted = 2 * SMALL.num_head_weights
    for position in range(7):
        counted += 2 * SMALL.num_layer_weights
        counted += SMALL.num_layers * SMALL.num_heads * (position + 1) * 2 * (2 * SMALL.head_dim)  # q·k, then p·v
    assert SMALL.prefill_flops(7) == counted


def test_every_id_is_a_token_and_text_comes_back():
    tokenizer = make_tokenizer(300)
    assert tokenizer.get_vocab_size() == 300
    words = {tokenizer.decode([id]) for id in range(257, 300)}
    assert len(words) == 43
    ids = tokenizer.encode("the naïve  path\n").ids
    assert tokenizer.decode(ids) == "the naïve  path\n"
    assert max(ids) < 300


def test_a_saved_model_is_loaded_as_any_other(tmp_path):
    directory = save_random_model(SMALL, tmp_path / "model", seed=3)
    model = load_model(directory)
    assert model.config.max_model_len == SMALL.max_positions
    assert model.report.num_parameters > SMALL.num_layer_weights + SMALL.num_head_weights
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    again = save_random_model(SMALL, tmp_path / "again", seed=3)
    weights = [(path / "model.safetensors").read_bytes() for path in (directory, again)]
    assert weights[0] == weights[1]


def test_a_prompt_in_two_parts_has_the_operations_of_the_whole():
    whole, prefix, rest = (SMALL.prefill_flops(num_tokens) for num_tokens in (12, 5, 7))
    assert prefix + rest + SMALL.prefix_flops(5, 7) == whole + 2 * SMALL.num_head_weights
