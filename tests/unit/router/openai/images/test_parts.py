"""Images in chats: their place in the prompt, what is refused and under which name, and what is stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.domain.errors import BatonError, InvalidRequest
from baton.domain.ids import RequestId
from baton.domain.media.identity import media_identity
from baton.domain.media.span import MediaGrid
from baton.services.router.openai.images.parts import checked_images
from baton.services.router.openai.request_parser import CHAT, COMPLETION, ParsedRequest, RawRequest, RequestParser
from baton.services.router.openai.schemas import TokenizeResult
from baton.services.router.openai.tokenization import TokenizationParser
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.vision.limits import ImageLimits
from baton.telemetry.metrics import REGISTRY
from tests.unit.router.text.text_models import bundled
from tests.unit.router.vision.pictures import coloured, data_url, picture
from tests.unit.router.vision.vision_models import (
    BOTH_TEMPLATE,
    NUM_ROWS,
    PARTS_TEMPLATE,
    load_vision_model,
    save_vision_model,
)

METADATA = RequestMetadata(RequestId("chatcmpl-1"), 0, 7)
RED, BLUE = coloured("red"), coloured("blue")
PARAM = "messages[0].content[{}].image_url.url"


def image(data: bytes = RED, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


class Router:
    """The parsers of one model."""

    def __init__(self, directory: Path, limits: ImageLimits | None = None, **model: str) -> None:
        save_vision_model(directory, **model)
        self.text, images = load_vision_model(directory)
        if limits is not None:
            images = replace(images, limits=limits)
        self.images = checked_images(images, self.text)
        self.validator = RequestValidator(self.text, "m", 1024, 60.0, images=self.images)
        self.parser = RequestParser(self.validator, self.text, "baton")
        self.placeholder = self.text.added_token("<image>")

    async def chat(self, *parts: Any, role: str = "user", **body: Any) -> ParsedRequest:
        return await self.parse({"model": "m", "messages": [{"role": role, "content": list(parts)}], **body})

    async def parse(self, body: dict[str, Any], endpoint: str = CHAT, *, stored: bool = False) -> ParsedRequest:
        return await self.parser.parse(RawRequest(endpoint, json.dumps(body).encode(), METADATA, stored))

    async def refusal(self, *parts: Any, **body: Any) -> tuple[str, str | None]:
        with pytest.raises(InvalidRequest) as refused:
            await self.chat(*parts, **body)
        return str(refused.value), refused.value.param


@pytest.fixture
def llava(tmp_path) -> Router:
    return Router(tmp_path)


async def test_unknown_names_of_an_image_are_named(tmp_path: Path):
    router = Router(tmp_path)
    part = {**image(detail="low", fps=2), "cache_control": {"type": "ephemeral"}, "uuid": None}
    parsed = await router.chat(part, text("what?"))
    assert parsed.request.unknown_fields == ("messages.content.cache_control", "messages.content.image_url.fps")


async def test_spans_lie_where_the_template_puts_images(llava):
    parsed = await llava.chat(text("see"), image(RED), text("and"), image(BLUE), text("which?"), n=2)
    [prompt] = parsed.request.prompts
    rows = (llava.placeholder,) * NUM_ROWS
    whole = llava.text.encode("[user]see<image>and<image>which?[assistant]", add_special_tokens=False)
    first = whole.index(llava.placeholder)
    assert prompt.count(llava.placeholder) == 2 * NUM_ROWS
    assert prompt[: first + NUM_ROWS] == llava.text.encode("[user]see", add_special_tokens=False) + rows
    for sequence in parsed.request.sequences:
        spans = sequence.media
        assert [prompt[span.first : span.end] for span in spans] == [rows, rows]
        assert [span.identity for span in spans] == [
            media_identity(data, llava.images.processor) for data in (RED, BLUE)
        ]
        assert [file.data for file in sequence.files] == [RED, BLUE]
        assert [file.param for file in sequence.files] == [PARAM.format(1), PARAM.format(3)]
    assert parsed.request.num_prompt_tokens == len(prompt)


async def test_a_grid_follows_the_size_of_the_image(tmp_path):
    router = Router(tmp_path, kind="qwen2_vl")
    turned = picture(56, 112, "JPEG", orientation=6)
    parsed = await router.chat(image(picture(56, 112)), image(turned), image(picture(1000, 1000), detail="low"))
    grids = [span.grid for span in parsed.request.sequences[0].media]
    assert grids == [MediaGrid(4, 2), MediaGrid(2, 4), MediaGrid(5, 5)]
    full = await router.chat(image(picture(1000, 1000)))
    [span], [low] = full.request.sequences[0].media, parsed.request.sequences[0].media[2:]
    assert span.grid == MediaGrid(8, 8)
    assert span.identity != low.identity


async def test_messages_without_images_keep_their_form(tmp_path):
    for name, template in (("both", BOTH_TEMPLATE), ("parts", PARTS_TEMPLATE)):
        (tmp_path / name).mkdir()
        router = Router(tmp_path / name, template=template)
        answer = {"role": "assistant", "content": "a circle"}
        tool = {"role": "tool", "tool_call_id": "1", "content": [text("shot"), image(BLUE)]}
        history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [image()]}, answer, tool]
        parsed = await router.parse({"model": "m", "messages": history})
        shown = "[system]be brief[user][assistant]a circle[tool]shot[assistant]"
        [prompt] = parsed.request.prompts
        assert router.text.decode(prompt, skip_special_tokens=True) == shown
        assert len(parsed.request.sequences[0].media) == 2
        words = await router.parse({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        assert router.text.decode(words.request.prompts[0], skip_special_tokens=True) == "[user]hi[assistant]"


async def test_what_is_stored_has_no_files_and_gives_the_same_request(llava):
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": [text("a"), image(RED, detail="low")]}],
    }
    body |= {"seed": 5, "unheard_of": [1.5]}
    fresh = await llava.parse(body)
    assert fresh.stored_body is not None
    assert data_url(RED).encode() not in fresh.stored_body
    assert len(fresh.stored_body) < 400
    again = await llava.parse(json.loads(fresh.stored_body), stored=True)
    assert again.stored_body is None
    assert again.request.prompts == fresh.request.prompts
    [before], [after] = fresh.request.sequences, again.request.sequences
    assert after.media == before.media
    [file] = after.files
    assert (file.identity, file.data, file.num_rows, file.detail) == (before.files[0].identity, None, NUM_ROWS, "low")
    message, param = await llava.refusal(json.loads(fresh.stored_body)["messages"][0]["content"][1])
    assert "must be a data: URL" in message  # a client cannot name an image that it has not sent
    assert param == PARAM.format(0)


@pytest.mark.parametrize(
    ("part", "name", "why"),
    [
        ({"type": "image_url"}, "image_url", 'must be an object such as {"url"'),
        ({"type": "image_url", "image_url": "data:"}, "image_url", "must be an object"),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "must be a string"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "image_url.url", "fetches nothing"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url", "must be a data: URL"),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}, "image_url.url", "fetches nothing"),
        (image(detail="huge"), "image_url.detail", "must be one of auto, low, high"),
        (image(RED[:-5]), "image_url.url", "the image is truncated"),
        (image(RED + b"PK"), "image_url.url", "the image is followed by other data"),
        (image(picture(4, 4, "GIF")), "image_url.url", "the image is GIF"),
        (image(b"hello"), "image_url.url", "no image that is accepted"),
        (image(picture(3000, 10)), "image_url.url", "no side may be 200 times"),
        ({"type": "input_audio", "input_audio": {}}, "", "must be a part of type text or image_url"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "", "must be a part of type text or image_url"),
    ],
)
async def test_the_part_that_is_refused_is_named(llava, part, name, why):
    message, param = await llava.refusal(image(), part)
    assert why in message
    assert param == f"messages[0].content[1].{name}".rstrip(".")
    assert len(message) < 500


async def test_refused_images_are_counted_by_reason(tmp_path):
    def counts() -> dict[str, float]:
        reasons = ("url", "file", "bytes", "number", "role", "detail")
        return {why: REGISTRY.get_sample_value("baton_media_refused_total", {"reason": why}) or 0.0 for why in reasons}

    router, before = Router(tmp_path, ImageLimits(max_images=3)), counts()
    await router.refusal({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, image(b"hello"))
    await Router(tmp_path, ImageLimits(max_request_bytes=len(RED))).refusal(image(), image())
    await router.refusal(image(), image(), image(), image())
    await router.refusal(image(detail="huge"))
    await router.refusal(image(), role="system")
    expected = {"url": 1, "file": 1, "bytes": 1, "number": 1, "role": 1, "detail": 1}
    assert {why: count - before[why] for why, count in counts().items()} == expected


async def test_only_users_and_tools_show_images(llava):
    for role in ("system", "assistant"):
        assert (await llava.refusal(image(), role=role))[1] == "messages[0].content[0].type"


async def test_limits_of_a_request(tmp_path):
    router = Router(tmp_path, ImageLimits(max_image_bytes=len(RED), max_images=3, max_request_bytes=2 * len(RED)))
    message, param = await router.refusal(image(), image(), image())
    assert "together" in message
    assert param == PARAM.format(2)
    assert f"is over {len(RED)} bytes" in (await router.refusal(image(picture(90, 90))))[0]
    many = Router(tmp_path, ImageLimits(max_images=3))
    message, param = await many.refusal(*[image()] * 100)
    assert "at most 3 images" in message
    assert param == "messages[0].content[3].image_url"


async def test_a_placeholder_in_text_is_refused(llava):
    for parts in ([text("an <image> of mine")], [image(), text("<image>")]):
        message, param = await llava.refusal(*parts)
        assert "placeholder" in message
        assert param is not None
        assert param.startswith("messages[0].content")
    body = {"model": "m", "messages": [{"role": "user", "content": "x<image>"}]}
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content: must not have the model's placeholder"):
        await llava.parse(body)
    split = {"model": "m", "messages": [{"role": "user", "content": [text("<ima"), text("ge>"), image()]}]}
    with pytest.raises(InvalidRequest, match="have the placeholder of an image as text"):
        await llava.parse(split)
    for prompt in ("an <image>", [5, llava.placeholder]):
        with pytest.raises(InvalidRequest, match="images come in chats"):
            await llava.parse({"model": "m", "prompt": prompt}, COMPLETION)


async def test_what_is_not_defined_with_images_is_refused(llava):
    for field, value in (("truncate_prompt_tokens", 10), ("prompt_logprobs", 1)):
        message, param = await llava.refusal(image(), **{field: value})
        assert "not supported with images" in message
        assert param == field


async def test_expanded_tokens_count_against_the_context(llava):
    with pytest.raises(BatonError, match="maximum context length is 1024"):
        await llava.chat(*[image()] * 16, text("a" * 3), max_tokens=1024 - 16 * NUM_ROWS)


async def test_a_model_of_text_names_the_content_as_ever():
    validator = RequestValidator(bundled(), "m", 256, 60.0)
    body = {"model": "m", "messages": [{"role": "user", "content": [text("a"), image()]}]}
    with pytest.raises(InvalidRequest) as refused:
        validator.chat(body, METADATA)
    assert refused.value.param == "messages[0].content"
    assert "this model reads nothing else" in str(refused.value)


async def test_a_model_whose_images_are_not_served_says_why(tmp_path):
    save_vision_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "paligemma"}))
    text_model, images = load_vision_model(tmp_path)
    assert images.rules is None
    validator = RequestValidator(text_model, "m", 256, 60.0, images=images)
    with pytest.raises(InvalidRequest, match="its images are not served: model type 'paligemma' is none of"):
        validator.chat({"model": "m", "messages": [{"role": "user", "content": [image()]}]}, METADATA)


async def test_a_template_without_images_serves_none(tmp_path):
    router = Router(tmp_path, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "does not show an image" in router.images.reason
    assert "does not show an image" in (await router.refusal(image()))[0]


async def test_tokenize_counts_images(llava):
    parser = TokenizationParser(llava.validator, llava.text)
    body = {"messages": [{"role": "user", "content": [image()]}]}
    result, unknown = parser.tokenize(json.dumps(body).encode(), METADATA, 1024)
    assert isinstance(result, TokenizeResult)
    assert unknown == ()
    assert result.tokens.count(llava.placeholder) == NUM_ROWS
    assert result.count == len(result.tokens)
