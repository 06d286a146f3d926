"""A cluster of workers on a GPU, alone and mixed with workers on the CPU: float32 tokens are the model's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from baton.bundled import MODEL_DIR
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from tests.cluster import Cluster
from tests.exactness.reference import Reference
from tests.exactness.test_cluster_exactness import ask, shaped_prompts, split
from tests.gpu.marks import needs_flashinfer, needs_gpu
from tests.tiny_models import add_tokenizer, save_random_config, small_shape

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
        """With a head size that flashinfer supports: the bundled model's is not, so it has no graphs."""
        config = transformers.Qwen3Config(**small_shape(head_dim=64, vocab_size=2048, tie_word_embeddings=True))
        model = add_tokenizer(save_random_config(config, tmp_path / "model", dtype=torch.bfloat16))
        flags = {"device": "cuda", "dtype": "bfloat16"}
        with Cluster(tmp_path, str(model), flags=flags, decode_flags={"cuda-graphs": graphs}) as cluster:
            log = cluster.processes["decode-0"].log.read_text()
            sizes = re.findall(r"cuda_graphs .*sizes=\[(.*)\]", log)
            assert [bool(found) for found in sizes] == [graphs]
            with split(cluster):
                for prompt in shaped_prompts(1)[1:]:
                    assert len(ask(cluster, prompt)) == 12
