"""Requests of every kind, whose answers do not depend on router or time.

`phases` and `load` choose from them. Prompts are token ids where their length matters. All are greedy or seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chaos.clients.client import CHAT, COMPLETIONS, ClientRequest

GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}


def tokens(num_tokens: int, start: int) -> list[int]:
    """A prompt of `num_tokens` ordinary ids, different for each `start`."""
    return [5 + (7 * i + start + i * i * start) % 500 for i in range(num_tokens)]


def completion(name: str, num_prompt_tokens: int, num_tokens: int, **more: object) -> ClientRequest:
    """Exactly `num_tokens` tokens after a prompt of `num_prompt_tokens`."""
    start = sum(name.encode()) % 97
    fixed = {"prompt": tokens(num_prompt_tokens, start), "max_tokens": num_tokens, "ignore_eos": True}
    return ClientRequest(name, COMPLETIONS, {**fixed, **GREEDY, **more})


def chat(name: str, text: str, num_tokens: int, **more: object) -> ClientRequest:
    """At most `num_tokens` tokens to a user's message; the model may stop earlier."""
    messages = [{"role": "user", "content": text}]
    return ClientRequest(name, CHAT, {"messages": messages, "max_tokens": num_tokens, **GREEDY, **more})


SHORT = completion("short", 40, 24)
STEADY = completion("steady", 70, 160)
SEEDED_PAIR = completion("seeded pair", 50, 90, n=2, **SEEDED)
STOPPED = completion("stopped", 60, 120, stop=["\n\n", "the"], temperature=0.7, seed=11)
TALK = chat("talk", "What is Baton, and who conducts the orchestra?", 64)
LONG = completion("long", 3000, 12)
LONGISH = completion("longish", 1800, 12, **SEEDED)
JSON = completion(
    "json", 45, 150, guided_json={"type": "array", "items": {"type": "integer"}, "minItems": 20}, **SEEDED
)
"""Constrained: killed in the middle of a grammar, it keeps to it."""
SEVERAL_PAGES = completion("several pages", 200, 30, **SEEDED)
MARATHON = completion("marathon", 60, 3500)
"""Outlasts a router's lease several times."""
FILLER = completion("filler", 30, 260)
FIRST_TURN = completion("first turn", 40, 160)

ALL = (SHORT, STEADY, SEEDED_PAIR, STOPPED, JSON, TALK, LONG, LONGISH, SEVERAL_PAGES, MARATHON, FILLER, FIRST_TURN)


def second_turn(answer: Sequence[int]) -> ClientRequest:
    """A next question after `FIRST_TURN` and its `answer`. Decode alone has the pages of the answer."""
    asked = completion("second turn", 20, 24)
    prompt = [*FIRST_TURN.parameters["prompt"], *answer, *asked.parameters["prompt"]]
    return replace(asked, parameters={**asked.parameters, "prompt": prompt})
