"""What the frontend says of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from baton.domain.worker import IMAGE, TEXT
from baton.services.router.frontend import ApiLimits
from tests.fake_dispatcher import FakeDispatcher, one_token_chunks
from tests.unit.router.memory_frontend import memory_frontend
from tests.unit.router.vision.vision_models import load_vision_model, save_vision_model


def modalities_of(directory: Path) -> list[str]:
    text, images = load_vision_model(directory)
    frontend = memory_frontend(FakeDispatcher(lambda s: one_token_chunks([2])), ApiLimits("tiny", max_model_len=64))
    return replace(frontend, text=text, images=images, encodes=lambda processor: True).modalities()


async def test_images_are_not_offered_without_a_chat_template(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    assert modalities_of(tmp_path) == [TEXT, IMAGE]
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    assert modalities_of(tmp_path) == [TEXT]
