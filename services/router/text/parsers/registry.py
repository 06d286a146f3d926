"""The formats of model output that are known, by name, and those of a chat template."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.text.parsers.reasoning import ReasoningFormat

AUTO, NONE = "auto", "none"
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""DeepSeek's name, which most clients read, and vLLM's."""

REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>", ("<think>", "</think>")),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
    )
}
"""`think`: Qwen 3, QwQ, DeepSeek R1 and V3.1, GLM 4.5. `mistral`: Magistral."""


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """The format of this name; `auto`: by the text of the chat template. Raises `KeyError`."""
    if name == NONE or template is None:
        return None
    if name != AUTO:
        return REASONING_FORMATS[name]
    known = REASONING_FORMATS.values()
    return next((each for each in known if any(signature in template for signature in each.signatures)), None)


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """What a model writes beside text; None: text only. `reasoning_fields`: of a message, that hold its reasoning."""

    reasoning: ReasoningFormat | None
    reasoning_fields: tuple[str, ...] = REASONING_FIELDS
