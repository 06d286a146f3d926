"""Pictures for the bundled vision-language model: one coloured shape at one place, and chats about it. All is seeded.

``train_bundled_vision_model.py`` trains on them; tests draw others, of seeds that were never trained on.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 70, 210),
    "yellow": (235, 215, 50),
    "purple": (140, 50, 170),
    "orange": (240, 140, 30),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = {
    "on the left": (0.24, 0.5),
    "on the right": (0.76, 0.5),
    "at the top": (0.5, 0.24),
    "at the bottom": (0.5, 0.76),
    "in the middle": (0.5, 0.5),
}
SIDES = (32, 48, 64, 96, 128)
"""Of pictures, in pixels; the image processor brings them to one size."""

WHOLE = (
    "What is in the picture?",
    "What is in this picture?",
    "What is in the image?",
    "What is in this image?",
    "What do you see?",
    "What is this?",
    "What is it?",
    "What does the picture show?",
    "Describe the picture.",
    "Describe this image.",
    "Describe it.",
)
COLOUR = (
    "What colour is it?",
    "What color is it?",
    "Which colour is it?",
    "What colour is the {shape}?",
    "What color is the {shape}?",
    "Which colour does the {shape} have?",
)
SHAPE = ("What shape is it?", "Which shape is it?", "What shape is {place}?", "What {colour} shape is it?")
PLACE = ("Where is it?", "Where is the {shape}?", "Where is the {colour} {shape}?", "Where is the shape?")
NO_PICTURE = ("Hello", "Hi", "Hello!", "Who are you?", "What can you do?", "Help", "Thank you.", "What is Baton?")
SHOW_ME = "Please show me a picture of one shape."

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """What a picture shows."""

    colour: str
    shape: str
    place: str

    @property
    def description(self) -> str:
        """The whole answer."""
        return f"A {self.colour} {self.shape} {self.place}.".replace("A orange", "An orange")

    def ask(self, rng: random.Random) -> tuple[str, str]:
        """A question about it, and the answer."""
        kind = rng.randrange(8)
        if kind < 4:
            return _vary(rng, rng.choice(WHOLE)), self.description
        if kind < 5:
            question, answer = rng.choice(COLOUR), f"{self.colour.capitalize()}."
        elif kind < 6:
            question, answer = rng.choice(SHAPE), f"A {self.shape}."
        else:
            question, answer = rng.choice(PLACE), f"{self.place.capitalize()}."
        return _vary(rng, question.format(colour=self.colour, shape=self.shape, place=self.place)), answer


def random_spec(rng: random.Random) -> PictureSpec:
    """One of all combinations."""
    return PictureSpec(rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(list(PLACES)))


def draw(spec: PictureSpec, rng: random.Random, smallest: int = 0) -> Image.Image:
    """An RGB picture of `spec`: size, shade, position and background vary. `smallest`: pixels of a side."""
    side = rng.choice([side for side in SIDES if side >= smallest])
    level = rng.choice((rng.randint(225, 255), rng.randint(0, 40)))
    picture = Image.new("RGB", (side, side), tuple(_near(level, rng, 6) for _ in range(3)))
    centre = [(share + rng.uniform(-0.06, 0.06)) * side for share in PLACES[spec.place]]
    colour = tuple(_near(value, rng, 14) for value in COLOURS[spec.colour])
    _draw_shape(ImageDraw.Draw(picture), spec.shape, centre[0], centre[1], rng.uniform(0.15, 0.22) * side, colour)
    return picture


def chat(rng: random.Random) -> tuple[list[Turn], list[Image.Image]]:
    """A chat of one or two questions, and its picture; one in ten has none."""
    if rng.random() < 0.1:
        question = rng.choice(NO_PICTURE + WHOLE)
        return [{"role": "user", "content": _vary(rng, question)}, {"role": "assistant", "content": SHOW_ME}], []
    spec, turns = random_spec(rng), list[Turn]()
    for number in range(rng.randint(1, 2)):
        question, answer = spec.ask(rng)
        content = show(question, first=rng.random() < 0.7) if number == 0 else question
        turns += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return turns, [draw(spec, rng)]


def show(question: str, *, first: bool = True) -> list[dict[str, str]]:
    """Content with a picture before the question, or behind it."""
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    return parts if first else parts[::-1]


def _vary(rng: random.Random, question: str) -> str:
    """Some people write no capitals and no marks."""
    if rng.random() < 0.15:
        question = question.lower()
    return question.rstrip("?.!") if rng.random() < 0.15 else question


def _near(value: int, rng: random.Random, spread: int) -> int:
    return min(255, max(0, value + rng.randint(-spread, spread)))


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, colour: tuple[int, ...]
) -> None:
    """`radius`: half of the width."""
    match shape:
        case "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        case "square":
            pen.rectangle((x - radius, y - radius, x + radius, y + radius), fill=colour)
        case "triangle":
            angles = [math.radians(degrees) for degrees in (-90, 30, 150)]
            pen.polygon([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], fill=colour)
        case _:
            arm = radius / 3
            pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
            pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
