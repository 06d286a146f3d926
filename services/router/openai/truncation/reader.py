"""Reads `truncate_prompt_tokens` and `truncation_side`, and cuts prompts by them. Notes errors, raises none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.services.router.openai.fields import Fields

LEFT, RIGHT = "left", "right"
CUTS = ("truncate_prompt_tokens", "truncation_side")


@dataclass(frozen=True, slots=True)
class PromptTruncation:
    """`num_tokens` that are kept; -1: as many as the context leaves. `side`: the one that is cut."""

    num_tokens: int
    side: str = LEFT

    def cut(self, tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
        """The tokens that are left of a prompt. `most`: tokens that the context leaves for it, at least one."""
        num_kept = most if self.num_tokens < 0 else self.num_tokens
        if len(tokens) <= num_kept:
            return tokens
        return tokens[-num_kept:] if self.side == LEFT else tokens[:num_kept]


def read_truncation(fields: Fields, scalars: Mapping[str, Any]) -> PromptTruncation | None:
    """The truncation of a body; None if it names no number of tokens."""
    num_tokens, side = scalars.get("truncate_prompt_tokens"), fields.values.get("truncation_side")
    if side not in (None, LEFT, RIGHT):
        fields.add_mismatch("truncation_side", "left or right")
        side = None
    return None if num_tokens is None else PromptTruncation(num_tokens, LEFT if side is None else str(side))
