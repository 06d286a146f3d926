"""What a failing tower costs: the prompts of its image, for now; never the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.domain.errors import Broken
from baton.engine.media.encoder import MediaEncoder
from baton.engine.media.store import HeldMedia, MediaStore
from baton.model.vision.embedding import MediaEmbedding
from baton.model.vision.tower import WrongRowCount

KEYS = [("", bytes([number]) * 16) for number in (1, 2)]


class Tower:
    """Fails at its first call with `error`."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]

    def encode(self, inputs: Any, num_rows: list[int]) -> list[MediaEmbedding]:
        if self._errors:
            raise self._errors.pop()
        return [MediaEmbedding(torch.zeros(num_rows[0], 2), ())]


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), TypeError("an argument"), WrongRowCount("3 rows"), KeyError("x")]
)
def test_a_fault_is_given_back_and_the_next_image_is_encoded(error: Exception):
    store: MediaStore[Any, MediaEmbedding] = MediaStore(1000)
    for key in KEYS:
        store.hold(key, HeldMedia({"pixel_values": torch.zeros(1)}, 3, None, 4, 4))
    encoder = MediaEncoder(Tower(error), store)  # type: ignore[arg-type]
    held = [(key, item) for key in KEYS if (item := store.find(key)) is not None]
    ((key, fault),) = encoder.encode(held)
    assert (key, type(fault)) == (KEYS[0], Broken)
    assert [store.get(key[1]) is None for key in KEYS] == [True, False]
    assert encoder.encode(held[:1]) == [], "nothing of the fault is kept"
    assert store.get(KEYS[0][1]) is not None
