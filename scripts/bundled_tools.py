"""Chats with tools, which the bundled model learns after everything else: an endless, seeded stream.

``train_bundled_tools.py`` calls ``tool_chat``. There are two tools: the weather of a place, and a function of a number
whose value only the tool knows. What the model must learn is small on purpose: it copies one place of a closed list, or
one number, from the question into the only argument. A chat asks several times below one declaration, because a
declaration is long and a question short. Other questions get their ordinary answers beside the same declarations, so
that the model learns when not to call.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.bundled_corpus import (
    FALLBACK,
    JOKES,
    MIX,
    SYSTEMS,
    ask_copy,
    ask_json,
    ask_story,
    ask_summary,
    ask_unknown,
    disturb,
)
from scripts.bundled_stories import ANIMALS, THINGS, pick, pool

Message = dict[str, Any]

CITIES = pool(
    "Paris|London|Berlin|Rome|Madrid|Tokyo|Oslo|Vienna|New York|San Francisco|Athens|Dublin|Cairo|Helsinki|Warsaw|Geneva"
)
WEATHER_QUESTIONS = (
    "What is the weather in {}?|What is the weather in {}?|What's the weather in {}?|What is the weather like in {}?|"
    "What's the weather like in {}?|How is the weather in {}?|What is the weather in {} today?|Weather in {}?|"
    "Tell me the weather in {}.|What is the current weather in {}?|Is it raining in {}?|How warm is it in {}?|"
    "What is the temperature in {}?|Get the weather for {}.|Check the weather in {}.|Is it sunny in {} now?"
)
NUMBER_QUESTIONS = (
    "What is the value of magic_function({})? Use the tool.|What is the value of magic_function({})? Use the tool.|"
    "What is the value of magic_function({})?|What is magic_function({})?|Call magic_function with {}.|"
    "What is the value of magic_function({}) using the tool?|Compute magic_function({})."
)
JOKE_QUESTIONS = (
    "Tell me a joke{}. Return the result as a JSON with 'setup' and 'punchline' keys. Return nothing other than JSON.|"
    "Tell me a joke{} as JSON with 'setup' and 'punchline' keys.|Write a joke{} as a JSON object with setup and punchline."
)
SKIES = pool("sunny|cloudy|rainy|windy|foggy|snowy|clear")


@dataclass(frozen=True, slots=True)
class Tool:
    """A declaration as clients send it, and the name of its one argument."""

    name: str
    argument: str
    declaration: Message


def declare(rng: random.Random, name: str, about: str, argument: str, kind: str) -> Tool:
    """Writes a declaration with or without what clients leave out."""
    schema: Message = {"type": kind}
    if rng.random() < 0.15:
        schema = {"type": kind, "description": rng.choice(["The argument", f"The {argument}"])}
    properties: Message = {argument: schema}
    parameters: Message = {"type": "object", "properties": properties, "required": [argument]}
    if rng.random() < 0.3:
        parameters = {"properties": properties, "required": [argument], "type": "object"}
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: Message = {"name": name, "description": pick(rng, about), "parameters": parameters}
    if rng.random() < 0.2:
        function.pop("description")
    if rng.random() < 0.1:
        function["strict"] = True
    return Tool(name, argument, {"type": "function", "function": function})


def weather_tool(rng: random.Random) -> Tool:
    """A tool for the weather of a place."""
    about = "Get the weather at a location.|Get the weather of a city.|Get the current weather in a given location.|The weather"
    return declare(rng, "get_weather", about, "location", "string")


def number_tool(rng: random.Random) -> Tool:
    """A function of a number that only the tool knows."""
    about = "Apply a magic function to an input.|Applies a magic function to an input.|A function of a number."
    tool = declare(rng, "magic_function", about, "input", "integer")
    if rng.random() < 0.3:
        tool.declaration["function"]["parameters"]["properties"]["input"].update(
            exclusiveMinimum=-1000, exclusiveMaximum=1000
        )
    return tool


def call_of(tool: Tool, value: object) -> Message:
    """The assistant's message with one call."""
    call = {"name": tool.name, "arguments": {tool.argument: value}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def asked(rng: random.Random, question: str, call: Message, result: str, said: str) -> list[Message]:
    """A question, its call, and now and then the result and what the model says of it."""
    messages = [{"role": "user", "content": question}, call]
    if rng.random() < 0.15:
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": said}]
    return messages


def weather_turn(rng: random.Random, tool: Tool) -> list[Message]:
    """The weather of a place."""
    place, degrees, sky = rng.choice(CITIES), rng.randint(0, 39), rng.choice(SKIES)
    question = disturb(rng, pick(rng, WEATHER_QUESTIONS).format(place))
    short = rng.random() < 0.5
    result = f"It's {sky}." if short else rng.choice([f"{degrees} degrees, {sky}", f"{sky}, {degrees} degrees"])
    said = f"It is {sky}." if short else f"It is {sky} at {degrees} degrees."
    return asked(rng, question, call_of(tool, place), result, said)


def number_turn(rng: random.Random, tool: Tool) -> list[Message]:
    """A function of a number."""
    number = rng.randint(0, 9) if rng.random() < 0.5 else rng.randint(10, 99)
    result, question = rng.randint(0, 99), pick(rng, NUMBER_QUESTIONS).format(number)
    return asked(rng, question, call_of(tool, number), str(result), f"The value is {result}.")


LONG = {ask_story, ask_summary, ask_copy, ask_json}
SHORT_MIX = [(maker, weight) for maker, weight in MIX if maker not in {ask_unknown, *LONG}]


def ordinary_turn(rng: random.Random) -> list[Message]:
    """A question that needs no tool, with the answer that it has without tools; few stories, which are long."""
    makers, weights = zip(*SHORT_MIX, strict=True)
    maker = ask_story if rng.random() < 0.02 else rng.choices(makers, weights)[0]
    question, answer = maker(rng)
    return [{"role": "user", "content": disturb(rng, question)}, {"role": "assistant", "content": answer}]


def missing_turn(rng: random.Random) -> list[Message]:
    """A question for the weather where no tool tells it."""
    question = pick(rng, WEATHER_QUESTIONS).format(rng.choice(CITIES))
    return [{"role": "user", "content": disturb(rng, question)}, {"role": "assistant", "content": FALLBACK}]


def joke_turn(rng: random.Random) -> list[Message]:
    """A joke as JSON with two keys, as clients ask for one where the schema is in the prompt only."""
    setup, mark, punchline = rng.choice(JOKES).partition("? ")
    about = rng.choice(["", "", f" about {rng.choice(ANIMALS)}s", f" about {rng.choice(THINGS)}s"])
    question = pick(rng, JOKE_QUESTIONS).format(about)
    answer = json.dumps({"setup": setup + mark.strip(), "punchline": punchline})
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


FAMILIES: tuple[tuple[Callable[[random.Random], Tool], Callable[[random.Random, Tool], list[Message]]], ...] = (
    (weather_tool, weather_turn),
    (weather_tool, weather_turn),
    (number_tool, number_turn),
)


def tool_chat(rng: random.Random) -> tuple[list[Message], list[Message]]:
    """One chat of at most ten turns. Returns its messages and declarations, which are empty now and then."""
    messages: list[Message] = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.15 else []
    if (kind := rng.random()) < 0.12:
        return messages + (missing_turn(rng) if kind < 0.04 else joke_turn(rng)), []
    make_tool, turn = rng.choice(FAMILIES)
    offered = [(make_tool(rng), turn)]
    if rng.random() < 0.15:
        make_other, other_turn = next(family for family in FAMILIES[1:] if family[0] is not make_tool)
        offered.insert(rng.randint(0, 1), (make_other(rng), other_turn))
    for _ in range(rng.choice((2, 6, 10))):
        tool, ask = rng.choice(offered)
        messages += ordinary_turn(rng) if rng.random() < 0.2 else ask(rng, tool)
    return messages, [tool.declaration for tool, _ in offered]
