"""Gemma 3 with attention planned for flashinfer, computed by a double of it, against transformers' `generate()`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.model.attention import backend_choice, flashinfer_backend
from baton.model.attention.torch_backend import TorchAttention
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, load_model
from baton.services.local.pair import LocalPair, PairLimits
from tests.exactness.vision.families import FAMILIES, make_chats
from tests.exactness.vision.test_vision_exactness import ALL, PAGE_SIZE, embeddings, own_tokens, served_tokens
from tests.unit.model.attention import fake_flashinfer
from tests.unit.model.loading.test_multimodal import save_random

pytestmark = pytest.mark.exactness


@pytest.mark.parametrize("decoder", [DecoderChoice.LEAN, DecoderChoice.STOCK])
def test_chats_with_images(decoder: DecoderChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to three images a chat, in full and sliding layers, beside chats of text, cold and with warm caches."""
    family = FAMILIES["gemma3"]
    whole, chats = save_random(family.config(), tmp_path), make_chats(family)
    expected = [own_tokens(whole, chat) for chat in chats]
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(backend_choice, "flashinfer_supports", lambda layers, storage: True)
    monkeypatch.delattr(TorchAttention, "attend")
    model = load_model(
        tmp_path, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, decoder=decoder, kernels=KernelUse.NEVER, vision=True
    )
    source = embeddings(model, chats)
    for budget in (16, 64, ALL) if decoder is DecoderChoice.LEAN else (16,):
        pair = LocalPair(model, PairLimits(token_budget=budget), source)
        assert served_tokens(pair, chats) == expected
        assert served_tokens(pair, chats) == expected, "with warm caches"
