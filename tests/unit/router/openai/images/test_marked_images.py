"""Images of Gemma 3 in chats: their marks are in the text before it is encoded, and clients cannot write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.services.router.openai.schemas import TokenizeResult
from baton.services.router.openai.tokenization import TokenizationParser
from tests.unit.router.openai.images.test_parts import BLUE, METADATA, RED, Router, image, text
from tests.unit.router.vision.vision_models import NUM_ROWS, PARTS_TEMPLATE

BEGIN, ROW, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@pytest.fixture
def gemma(tmp_path: Path) -> Router:
    return Router(tmp_path, kind="gemma3", template=PARTS_TEMPLATE.replace("<image>", BEGIN))


async def test_the_prompt_has_the_ids_of_the_whole_text(gemma):
    parsed = await gemma.chat(text("see\n"), image(RED), image(BLUE), text("\nwhich?"))
    [prompt] = parsed.request.prompts
    marked = f"\n\n{BEGIN}{ROW * NUM_ROWS}{END}\n\n"
    whole = f"[user]see\n{marked}{marked}\nwhich?[assistant]"
    assert prompt == gemma.text.encode(whole, add_special_tokens=False)
    placeholder = gemma.text.added_token(ROW)
    spans = parsed.request.sequences[0].media
    assert [prompt[span.first : span.end] for span in spans] == [(placeholder,) * NUM_ROWS] * 2


async def test_tokenize_counts_the_same(gemma):
    body = {"messages": [{"role": "user", "content": [text("a"), image(), text("b")]}]}
    parsed = await gemma.chat(text("a"), image(), text("b"))
    result, _ = TokenizationParser(gemma.validator, gemma.text).tokenize(json.dumps(body).encode(), METADATA, 1024)
    assert isinstance(result, TokenizeResult)
    assert result.count == parsed.request.num_prompt_tokens


@pytest.mark.parametrize("mark", [BEGIN, ROW])
async def test_marks_as_text_are_refused(gemma, mark):
    message, param = await gemma.refusal(text(f"a{mark}b"), image())
    assert f"placeholder for images, {mark}" in message
    assert param == "messages[0].content[0]"


async def test_text_alone_is_as_ever(gemma):
    [prompt] = (await gemma.chat(text("a\n"), text("b"))).request.prompts
    assert prompt == gemma.text.encode("[user]a\n\nb[assistant]", add_special_tokens=False)
