"""A cluster of workers on a GPU, alone and mixed with workers on the CPU: float32 tokens are the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.bundled import MODEL_DIR
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from tests.cluster import Cluster
from tests.exactness.reference import Reference
from tests.exactness.test_cluster_exactness import ask, shaped_prompts, split
from tests.gpu.marks import needs_flashinfer, needs_gpu

PAGES = {"page-size": 8, "dtype": "float32"}


@pytest.mark.parametrize("transport", ["nixl", "stream"])
@pytest.mark.parametrize(("prefill", "decode"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.integration
class TestFloat32:
    """Served by the torch backend: flashinfer has no float32."""

    pytestmark = needs_gpu

    def test_tokens_are_the_models_own(self, transport: str, prefill: str, decode: str, tmp_path: Path) -> None:
        cluster = Cluster(
            tmp_path,
            transport=transport,
            flags=PAGES,
            prefill_flags={"token-budget": 24, "device": prefill},
            decode_flags={"device": decode},
        )
        reference = Reference(MODEL_DIR)
        with cluster, split(cluster):
            for prompt in shaped_prompts(1):
                assert ask(cluster, prompt) == reference.generate(prompt, 12), f"{len(prompt)} tokens"


@pytest.mark.integration
class TestBfloat16:
    """Compares logits with float32, at start, in the self-check: rounding decides near-ties of tokens."""

    pytestmark = needs_flashinfer

    def test_the_error_is_that_of_rounding(self) -> None:
        model = load_model(MODEL_DIR, dtype=DtypeChoice.BFLOAT16, device="cuda")
        assert model.config.torch_dtype is torch.bfloat16
        assert model.report.check.passed

    @pytest.mark.parametrize("graphs", [True, False])
    def test_a_cluster_answers_with_and_without_graphs(self, graphs: bool, tmp_path: Path) -> None:
        flags = {"device": "cuda", "dtype": "bfloat16"}
        with Cluster(tmp_path, flags=flags, decode_flags={"cuda-graphs": graphs}) as cluster, split(cluster):
            for prompt in shaped_prompts(1)[1:]:
                assert len(ask(cluster, prompt)) == 12
