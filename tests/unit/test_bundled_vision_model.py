"""The bundled model for images: small enough to ship, right about pictures that it has not seen, exact when served."""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from baton.bundled import VISION_DIR
from baton.domain.request import SamplingParams, StopParams
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import DecoderChoice, load_model
from baton.model.vision.embedding import MediaEmbedding
from baton.model.vision.image_processor import ImageProcessor
from baton.model.vision.spec import vision_spec
from baton.services.local.pair import LocalPair, PairLimits
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import read_image_model
from baton.settings.model_source import ModelFiles, resolve_model
from scripts.bundled_pictures import SHOW_ME, PictureSpec, chat, draw, random_spec, show
from scripts.train_bundled_vision_model import (
    BATCH,
    NUM_ROWS,
    ChatBatchBuilder,
    TrainingRun,
    count_right,
    model_card,
    pixels,
)

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 2_000_000
UNSEEN = 20_260_101
"""A seed of pictures that was not used in training, nor for the figure in the model's card."""
NUM_PICTURES = 300
NUM_TOKENS = 16
GREEDY, STOP = SamplingParams(temperature=0.0), StopParams(NUM_TOKENS, 0, frozenset({2}))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoProcessor.from_pretrained(VISION_DIR).tokenizer


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    return LlavaForConditionalGeneration.from_pretrained(VISION_DIR, dtype=torch.float32).eval()


def test_it_fits_into_the_wheel(model: LlavaForConditionalGeneration) -> None:
    assert sum(path.stat().st_size for path in VISION_DIR.iterdir()) <= MAX_BYTES
    assert all(torch.equal(p, p.to(torch.bfloat16).float()) for p in model.parameters())


def test_its_card_is_what_the_script_writes(model: LlavaForConditionalGeneration) -> None:
    run = TrainingRun(model, learning_rate=0.0)
    run.step, run.seconds = 900, 5.8 * 60
    options = argparse.Namespace(seed=1, steps=900, threads=1)
    card = model_card(sum(parameter.numel() for parameter in model.parameters()), run, (985, 971), options)
    assert (VISION_DIR / "README.md").read_text(encoding="utf-8") == card


@pytest.mark.parametrize("files", [ModelFiles.ALL, ModelFiles.TEXT])
def test_its_name_is_known_to_workers_and_routers(files: ModelFiles) -> None:
    assert resolve_model("bundled-vision", files) == VISION_DIR


def test_pictures_and_chats_are_seeded() -> None:
    drawn = [[(turns, [p.tobytes() for p in pictures]) for turns, pictures in map(chat, [rng] * 20)]
             for rng in map(random.Random, (5, 5, 6))]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]


def test_training_saw_what_the_template_and_the_image_processor_give(tokenizer: PreTrainedTokenizerFast) -> None:
    rng, batch = random.Random("7-3"), ChatBatchBuilder(tokenizer, seed=7).batch(3)
    chats, processor = [chat(rng) for _ in range(BATCH)], AutoProcessor.from_pretrained(VISION_DIR).image_processor
    for row, label, (turns, _) in zip(batch["input_ids"], batch["labels"], chats, strict=True):
        text = tokenizer.apply_chat_template(turns, tokenize=False).replace("<image>", "<image>" * NUM_ROWS)
        assert tokenizer.decode(row[row > 0]) == text
        said = "".join(f"{turn['content']}<|im_end|>" for turn in turns if turn["role"] == "assistant")
        assert tokenizer.decode(label[label >= 0]) == said
    for picture in [picture for _, pictures in chats for picture in pictures][:9]:
        assert torch.allclose(
            processor(picture, return_tensors="pt").pixel_values[0], torch.from_numpy(pixels(picture))
        )


def test_nearly_all_answers_about_unseen_pictures_are_right(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """To the word: colour, shape and place. The card has 985 of 1,000; a sample of 300 varies by two."""
    right, wrong = count_right(model, tokenizer, UNSEEN, NUM_PICTURES)
    assert right >= 0.98 * NUM_PICTURES, (right, wrong)


class ServedModel:
    """The model as a cluster serves it: the router counts and expands, the tower encodes, both engines compute."""

    def __init__(self, decoder: DecoderChoice) -> None:
        self._text = TextModel.load(VISION_DIR)
        self._images = read_image_model(VISION_DIR, self._text.added_token, self._text.encode)
        self._processor = ImageProcessor(VISION_DIR, vision_spec("llava"))
        self._model = load_model(VISION_DIR, dtype=DtypeChoice.FLOAT32, page_size=8, decoder=decoder, vision=True)
        self._embeddings: dict[bytes, MediaEmbedding] = {}
        self._pair = LocalPair(self._model, PairLimits(token_budget=16), self._embeddings)

    def answer(self, question: str, url: str) -> Answer:
        """Asks for a chat with one picture, given as a `data:` URL."""
        image = self._images.open_url(url, "auto", "messages[0].content[0].image_url.url")
        picture = Image.open(io.BytesIO(image.file.data or b"")).convert("RGB")
        prepared = self._processor.prepare(*picture.size, picture.tobytes())
        assert self._model.tower is not None
        [embedding] = self._model.tower.encode(prepared.inputs, [prepared.num_rows])
        self._embeddings[image.file.identity] = embedding
        prompt = self._text.render_chat([{"role": "user", "content": show(question)}])
        ids, spans = self._images.place(self._text.encode(prompt, add_special_tokens=False), [image])
        assert self._pair.submit(ids, GREEDY, STOP, media=tuple(spans)) is not None
        tokens = [token.token for part in self._pair.run() for token in part.tokens]
        return Answer(ids, tokens, self._text.decode(tokens, skip_special_tokens=True), prepared.inputs["pixel_values"])


def png_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True)
class Answer:
    """Prompt and tokens of the answer, its text, and the picture's tensor."""

    prompt: tuple[int, ...]
    tokens: list[int]
    text: str
    pixels: torch.Tensor


@pytest.mark.parametrize("decoder", [DecoderChoice.LEAN, DecoderChoice.STOCK])
def test_served_answers_are_the_models_own_and_right(
    decoder: DecoderChoice, model: LlavaForConditionalGeneration
) -> None:
    """Every prompt has equal ids, so only pages that know their picture can be right; the chat is asked twice."""
    served, rng = ServedModel(decoder), random.Random(UNSEEN)
    specs = [random_spec(rng) for _ in range(6)]
    shown = [(spec, draw(spec, rng)) for spec in specs]
    for spec, picture in (*shown, shown[0]):
        answer = served.answer("What is in the picture?", png_url(picture))
        ids = torch.tensor([answer.prompt])
        with torch.inference_mode():
            own = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=answer.pixels,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
            )
        assert answer.tokens == own[0, len(answer.prompt) :].tolist()
        assert answer.text == spec.description


def test_it_asks_for_a_picture_and_answers_a_second_question(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    spec = PictureSpec("green", "triangle", "at the top")
    processor = AutoProcessor.from_pretrained(VISION_DIR).image_processor
    picture = processor(draw(spec, random.Random(UNSEEN)), return_tensors="pt")
    first = [{"role": "user", "content": show("What is this?")}, {"role": "assistant", "content": spec.description}]
    for turns, wanted in (
        ([{"role": "user", "content": "Hello"}], SHOW_ME),
        ([*first, {"role": "user", "content": "What color is the triangle?"}], "Green."),
        ([*first, {"role": "user", "content": "Where is it?"}], "At the top."),
        ([{"role": "user", "content": show("What shape is it?", first=False)}], "A triangle."),
    ):
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        text = text.replace("<image>", "<image>" * NUM_ROWS)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        inputs = dict(picture) if "<image>" in text else {}
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, **inputs
            )
        assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True) == wanted


def test_the_request_in_the_docs_gets_the_answer_in_the_docs() -> None:
    page = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    [body] = re.findall(r"-d '(\{.*\})'", page)
    image, text = json.loads(body)["messages"][0]["content"]
    answer = ServedModel(DecoderChoice.LEAN).answer(text["text"], image["image_url"]["url"])
    assert f'"{answer.text}"' in page
