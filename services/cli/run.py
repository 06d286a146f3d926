"""`baton run MODEL`: generates text in this process, through prefill, handoff and decode, without any service.

Registered by `baton.services.cli.main`. The engines are those of `LLM`, which is imported when the command runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from baton.domain.request import StopParams
from baton.services.cli.worker_packages import require_worker_packages

if TYPE_CHECKING:
    from baton.services.local.llm import LLM


def run_model(
    model: str = "bundled",
    /,
    *prompt: str,
    interactive: Annotated[bool, Parameter(name=["--interactive", "-i"], negative=())] = False,
    max_tokens: int = 256,
    temperature: float | None = None,
) -> int:
    """Generate text in this process: prefill, handoff and decode in one thread, for debugging.

    Parameters
    ----------
    model
        `bundled`, a directory with a Hugging Face model, or a Hugging Face id.
    prompt
        The user's message; without one, or with `-i`, messages are read from standard input, one a line.
    interactive
        Read further messages after the first answer; each answer sees the whole chat.
    max_tokens
        Longest answer.
    temperature
        0 is greedy; default: what the model's makers recommend.
    """
    require_worker_packages("baton run")
    from baton.services.local.llm import LLM

    llm = LLM(model)
    chat: list[dict[str, str]] = []
    for message in _messages(prompt, interactive or not prompt):
        chat.append({"role": "user", "content": message})
        answer = _answer(llm, chat, max_tokens, temperature)
        chat.append({"role": "assistant", "content": answer})
    return 0


def _messages(prompt: Sequence[str], read_more: bool) -> Iterator[str]:
    if prompt:
        yield " ".join(prompt)
    while read_more:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(llm: LLM, chat: list[dict[str, str]], max_tokens: int, temperature: float | None) -> str:
    """Prints the answer as it comes. A model without a chat template completes the last message."""
    from baton.services.router.text.chat_template import RenderOptions

    text = chat[-1]["content"]
    if llm.text.has_chat_template:
        text = llm.text.render_chat(chat, RenderOptions(int(time.time())))
    tokens = llm.text.encode(text, add_special_tokens=not llm.text.has_chat_template)
    sampling = llm.default_sampling()
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    stop = StopParams(max_tokens, stop_token_ids=llm.text.eos_token_ids)
    pieces: list[str] = []
    for event in llm.generate(tokens, sampling, stop=stop, stream=True):
        print(event.text, end="", flush=True)
        pieces.append(event.text)
    print()
    return "".join(pieces)
