"""Trains the bundled vision-language model on drawn pictures: a seeded run on one CPU core.

    python -m scripts.train_bundled_vision_model --out baton/bundled/vision

Steps: train a small byte-level BPE on chats (``bundled_pictures.py``), train a LLaVA (CLIP tower, Llama text model) on
pictures that are drawn as they are needed, round the weights to bfloat16, count right answers on pictures of another
seed, and write the directory that ships in the wheel. Every step draws from a seed of its own, so a run that was
stopped goes on from its ``--checkpoint`` as if it had not been.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from scripts.bundled_corpus import END, END_OF_TEXT, START
from scripts.bundled_pictures import COLOURS, SHAPES, WHOLE, chat, draw, random_spec, show
from scripts.train_bundled_model import ADAMW_LEARNING_RATE, EVAL_SEED_OFFSET, SPLIT, TEMPERATURE, Muon, log, schedule

IMAGE = "<image>"
IMAGE_ID = 3
VOCABULARY = 512
CONTEXT = 1024
SIDE, PATCH = 32, 8
NUM_ROWS = (SIDE // PATCH) ** 2
BATCH = 64
IGNORED = -100
SMALLEST = 48
"""Side of the pictures on which answers are counted: a shape of ten pixels is often taken for another."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {%- if part.type == 'image' %}{{- '<image>' }}{%- else %}{{- part.text or '' }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def train_tokenizer(seed: int, num_chats: int = 5_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE; the three special tokens of the bundled model and the image are ids 0 to 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END, IMAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(seed)
    texts = (text_of(turn["content"]) for _ in range(num_chats) for turn in chat(rng)[0])
    roles = itertools.repeat("user assistant system\n", 100)
    tokenizer.train_from_iterator(itertools.chain(texts, roles), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, IMAGE],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def text_of(content: str | list[dict[str, str]]) -> str:
    """A message's text, without its picture."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def build_model(seed: int, vocab_size: int) -> LlavaForConditionalGeneration:
    """A LLaVA of less than a million parameters with fresh weights."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=96, intermediate_size=384, num_hidden_layers=2, num_attention_heads=3, image_size=SIDE,
        patch_size=PATCH, projection_dim=96,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE_ID, image_seq_length=NUM_ROWS,
        vision_feature_layer=-1, vision_feature_select_strategy="default", tie_word_embeddings=False,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config).float()


def build_processor() -> CLIPImageProcessorPil:
    """Resizes every picture to one size, without a crop: a place stays one."""
    size = {"height": SIDE, "width": SIDE}
    return CLIPImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def pixels(picture: Image.Image) -> np.ndarray:
    """What the image processor makes of a picture, [3, SIDE, SIDE], at a fraction of its cost."""
    resized = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return (np.asarray(resized, dtype=np.float32).transpose(2, 0, 1) / 255 - 0.5) / 0.5


class ChatBatchBuilder:
    """Batches of chats; each step's is a function of the seed and its number."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        """`tokenizer`: the model's."""
        self._tokenizer, self._seed = tokenizer, seed
        self._roles = {role: self._encode(f"{START}{role}\n") for role in ("user", "assistant")}
        self._end = self._encode(f"{END}\n")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Inputs of the model for `BATCH` chats, with labels for what the assistant says."""
        rng = random.Random(f"{self._seed}-{step}")
        chats = [chat(rng) for _ in range(BATCH)]
        rows = [self._render(turns) for turns, _ in chats]
        longest = max(len(ids) for ids, _ in rows)
        ids = [ids + [0] * (longest - len(ids)) for ids, _ in rows]
        labels = [label + [IGNORED] * (longest - len(label)) for _, label in rows]
        drawn = np.stack([pixels(picture) for _, pictures in chats for picture in pictures])
        return {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "pixel_values": torch.from_numpy(drawn),
        }

    def _render(self, turns: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Ids as the chat template gives them, and their labels."""
        ids: list[int] = []
        labels: list[int] = []
        for turn in turns:
            said = turn["role"] == "assistant"
            content = self._content(turn["content"])
            ids += self._roles[turn["role"]] + content + self._end
            body = [*content, self._end[0]]
            labels += [IGNORED] * len(self._roles[turn["role"]])
            labels += body if said else [IGNORED] * len(body)
            labels += [IGNORED] * (len(self._end) - 1)
        return ids, labels

    def _content(self, content: str | list[dict[str, str]]) -> list[int]:
        if isinstance(content, str):
            return self._encode(content)
        return [
            id
            for part in content
            for id in ([IMAGE_ID] * NUM_ROWS if part["type"] == "image" else self._encode(part["text"]))
        ]


def loss_of(model: LlavaForConditionalGeneration, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy in nats of the answers' tokens. Padding is behind all that counts, and needs no mask."""
    hidden = model.model(
        input_ids=batch["input_ids"], pixel_values=batch["pixel_values"], use_cache=False
    ).last_hidden_state
    wanted = batch["labels"][:, 1:]
    counts = wanted != IGNORED
    logits = model.lm_head(hidden[:, :-1][counts])
    return torch.nn.functional.cross_entropy(logits, wanted[counts])


class TrainingRun:
    """The model, its optimisers, and where the run is: steps, and seconds of CPU time."""

    def __init__(self, model: LlavaForConditionalGeneration, learning_rate: float) -> None:
        """Muon for the matrices between layers, AdamW for tables, patches and norms."""
        self.model, self.step, self.seconds = model, 0, 0.0
        named = list(model.named_parameters())
        hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
        own = {id(p) for p in hidden}
        self._muon, self._learning_rate = Muon(hidden), learning_rate
        others = [p for _, p in named if id(p) not in own]
        self._adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def learn(self, batch: dict[str, torch.Tensor], num_steps: int) -> float:
        """One step of `num_steps`. Returns the loss."""
        progress = self.step / num_steps
        loss = loss_of(self.model, batch)
        loss.backward()
        for parameter in self.model.parameters():  # the tower's last norm is not used
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._muon.step(schedule(progress, self._learning_rate), weight_decay=0.02)
        self._adamw.param_groups[0]["lr"] = schedule(progress, ADAMW_LEARNING_RATE)
        self._adamw.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        """Writes a checkpoint; a stop in the middle of it leaves the old one."""
        state = {
            "model": self.model.state_dict(), "adamw": self._adamw.state_dict(), "muon": self._muon.momenta,
            "step": self.step, "seconds": self.seconds,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self._adamw.load_state_dict(state["adamw"])
        self._muon.momenta.update(state["muon"])
        self.step, self.seconds = state["step"], state["seconds"]


def count_right(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    count: int,
    smallest: int = SMALLEST,
) -> tuple[int, list[str]]:
    """Whole answers that are right to the word for `count` pictures of `seed`, and the first that are not.

    `smallest`: pixels of a side.
    """
    rng, processor, right, wrong = random.Random(seed), build_processor(), 0, []
    for question in itertools.islice(itertools.cycle(WHOLE), count // 25):
        specs = [random_spec(rng) for _ in range(25)]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": show(question)}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(text.replace(IMAGE, IMAGE * NUM_ROWS), add_special_tokens=False)
        prompt = torch.tensor([ids] * len(specs))
        drawn = processor(images=[draw(spec, rng, smallest) for spec in specs], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            output = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), pixel_values=drawn, max_new_tokens=16,
                do_sample=False,
            )  # fmt: skip
        for spec, answer in zip(specs, output[:, len(ids) :].tolist(), strict=True):
            said = tokenizer.decode(answer, skip_special_tokens=True)
            right += said == spec.description
            wrong += [f"{spec.description} -> {said}"] if said != spec.description else []
    return right, wrong[:5]


def save(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, out: Path, card: str) -> None:
    """Writes the shipped directory: bfloat16 weights, configs, tokenizer, chat template, image processor, card."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=[2, 0], pad_token_id=0, do_sample=True, temperature=TEMPERATURE
    )
    model.to(torch.bfloat16).save_pretrained(out)
    processor = LlavaProcessor(
        build_processor(), tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE, image_token=IMAGE, num_additional_image_tokens=1,
    )  # fmt: skip
    processor.save_pretrained(out)
    processor.image_processor.save_pretrained(out)  # older readers look for preprocessor_config.json
    (out / "model.safetensors").chmod(0o644)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT_TEMPLATE  # older readers look for it here
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    (out / "README.md").write_text(card)


def model_card(num_parameters: int, run: TrainingRun, right: tuple[int, int], options: argparse.Namespace) -> str:
    """The model directory's README with the figures of this run."""
    return f"""# The bundled vision-language model

A tiny LLaVA (CLIP tower, Llama text model, {num_parameters:,} parameters, its own byte-level BPE, bfloat16) that ships with Baton, so
that the first image needs no download. It names the colour, the shape and the place of one shape on a plain ground.
Colours: {", ".join(COLOURS)}. Shapes: {", ".join(SHAPES)}. Places: left, right, top, bottom, middle.
It knows nothing else: it is for demonstrations and tests.

| | |
|---|---|
| trained by | `python -m scripts.train_bundled_vision_model --seed {options.seed} --steps {options.steps} --threads {options.threads}` |
| trained on | {run.step * BATCH:,} chats, their pictures drawn by `scripts/bundled_pictures.py`; nothing was downloaded |
| time | {run.seconds / 60:.1f} minutes of CPU time on {options.threads} thread, training alone |
| "What is in the picture?", asked in {len(WHOLE)} ways about pictures of another seed, of 48 pixels and more | {right[0]} of 1,000 answers right to the word, after rounding to bfloat16 |
| the same, a fifth of the pictures with 32 pixels | {right[1]} of 1,000 |
| a picture | is resized to {SIDE}x{SIDE} pixels, {NUM_ROWS} tokens |
| licence | Apache-2.0 |
"""


def parse_options(arguments: Iterator[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("baton/bundled/vision"))
    parser.add_argument("--steps", type=int, default=900, help=f"optimizer steps of {BATCH} chats")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="peak, of the matrices")
    parser.add_argument("--checkpoint", type=Path, help="written every 100 steps; the run goes on from it")
    return parser.parse_args(None if arguments is None else list(arguments))


def main() -> None:
    """Trains, measures and saves."""
    options, started = parse_options(), time.monotonic()
    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer(options.seed)
    model = build_model(options.seed, len(tokenizer))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log(f"{len(tokenizer)} tokens, {num_parameters} parameters", started)
    run, builder, recent = TrainingRun(model, options.learning_rate), ChatBatchBuilder(tokenizer, options.seed), []
    if options.checkpoint and options.checkpoint.exists():
        run.load(options.checkpoint)
    while run.step < options.steps:
        before = time.process_time()
        recent.append(run.learn(builder.batch(run.step), options.steps))
        run.seconds += time.process_time() - before
        if run.step % 100 == 0:
            right, _ = count_right(model, tokenizer, options.seed + 1, 50)
            log(f"step {run.step} loss {sum(recent) / len(recent):.4f} right {right}/50", started)
            recent.clear()
            if options.checkpoint:
                run.save(options.checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    seed = options.seed + EVAL_SEED_OFFSET
    right, wrong = count_right(model, tokenizer, seed, 1000)
    every, _ = count_right(model, tokenizer, seed, 1000, smallest=0)
    log(f"{right} of 1000 right, {every} with small pictures; wrong: {wrong}", started)
    save(model, tokenizer, options.out, model_card(num_parameters, run, (right, every), options))
    log(f"saved to {options.out}", started)


if __name__ == "__main__":
    main()
