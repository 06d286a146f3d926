"""Figures of quantisation losses, and the whole experiment on a tiny shape."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console

from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from bench.engine import quantization
from bench.engine.quantization import (
    ARMS,
    AccuracyLoss,
    bundled_texts,
    loss_of,
    losses,
    matrices,
    mean_nll,
    parse,
    random_texts,
    remarks_of,
    speed_blocks,
    speed_of,
    step_blocks,
)
from bench.harness.model_shapes import SHAPES
from bench.harness.random_models import save_random_model
from tests.kernels import kernel_levels

needs_kernels = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")


def test_a_texts_loss_is_that_of_its_next_tokens():
    likely = torch.tensor([[0.8, 0.2], [0.5, 0.5], [0.1, 0.9]]).log()
    assert mean_nll([likely], [[1, 0, 1]]) == pytest.approx(-(math.log(0.8) + math.log(0.5)) / 2)
    assert mean_nll([likely, likely[:2]], [[1, 0, 1], [0, 1]]) == pytest.approx(-math.log(0.8 * 0.5 * 0.2) / 3)


def test_losses_compare_another_model_with_float32():
    exact = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.5, 0.5]]).log()
    other = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.5, 0.5]]).log()
    loss = loss_of([exact], [other + 2.0], [[0, 0, 1]])
    assert loss.divergence == pytest.approx((0.4 * math.log(0.4 / 0.6) + 0.6 * math.log(0.6 / 0.4)) / 3)
    assert loss.agreement == pytest.approx(2 / 3)
    assert loss.mean_nll - loss.mean_nll_float32 == pytest.approx(-(math.log(0.4) - math.log(0.6)) / 2)
    assert loss.perplexity_change == pytest.approx((0.6 / 0.4) ** 0.5 - 1)
    same = loss_of([exact], [exact], [[0, 0, 1]])
    assert (same.agreement, same.perplexity_change) == (1.0, 0.0)


def test_texts_are_unseen_and_reproducible():
    texts = bundled_texts(2)
    assert [len(text) for text in texts] == [256, 256]
    assert texts[0] != texts[1]
    assert texts == bundled_texts(2)
    assert max(max(text) for text in random_texts(50, 3, seed=0)) < 50


@pytest.mark.parametrize("name", SHAPES)
def test_the_matrices_are_all_of_a_layers_weights(name: str):
    shape = SHAPES[name]
    assert shape.num_layers * sum(math.prod(size) for size in matrices(shape).values()) == shape.num_layer_weights


def test_remarks_say_all_figures():
    loss = AccuracyLoss(divergence=0.00123, agreement=0.991, mean_nll=1.0, mean_nll_float32=1.001)
    [remark] = remarks_of({"bundled": {"int8": loss}})
    assert remark.name == "bundled, int8"
    assert remark.text == "KL 0.00123 nats, top-1 agreement 0.9910, perplexity -0.100%"


@needs_kernels
def test_losses_of_a_random_model_are_small(tmp_path):
    directory = save_random_model(SHAPES["tiny"], tmp_path)
    found = losses(directory, random_texts(SHAPES["tiny"].vocab_size, 1, seed=0))
    assert found.keys() == ARMS.keys()
    assert all(0.0 < loss.divergence < 0.01 for loss in found.values())
    assert all(loss.agreement > 0.9 for loss in found.values())


@needs_kernels
def test_every_matrix_is_measured_with_every_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantization, "BLOCK_S", 0.0)
    monkeypatch.setattr(quantization, "WEIGHT_BYTES", 1)
    monkeypatch.setattr(quantization, "ReadProbe", lambda: lambda: 1e9)
    options = parse("--shape tiny --rows 1 3 --rotations 2".split())
    kernels = choose_kernels(KernelUse.AUTO, "cpu").kernels
    assert kernels is not None
    ran = dict(speed_blocks(options, kernels, Console(file=io.StringIO())))
    assert len(ran) == 4 * 2
    assert all(len(block.cpu_s) >= quantization.MIN_STEPS for blocks in ran.values() for block in blocks)
    steps = dict(step_blocks(options, Console(file=io.StringIO())))
    assert list(steps) == ["decode step, 1 rows", "decode step, 3 rows"]
    findings = [speed_of(name, blocks) for name, blocks in (ran | steps).items()]
    assert all(found.num_rotations == 2 and found.overall.median > 0.0 for found in findings)
