"""Prompts as token ids, reproducible from a seed. Used by `plan`; knows no tokenizer.

Ids are drawn evenly from `[FIRST_ID, vocab_size)`: the lowest are special tokens in nearly every vocabulary. For chats
every id stands for one short word, so equal tokens are equal words and prefixes stay prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div

FIRST_ID = 4

WORDS = tuple(
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part".split()
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of prompts and the seed of all draws. Raises `ValueError` for an empty range of ids."""

    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size <= FIRST_ID:
            raise ValueError(f"the vocabulary size must be over {FIRST_ID}")

    def draw(self, num_tokens: int, *name: int | str) -> tuple[int, ...]:
        """Draws `num_tokens` ids; the same name gives the same ids."""
        rng = random.Random(f"{self.seed}/{'/'.join(map(str, name))}")
        return tuple(rng.choices(range(FIRST_ID, self.size), k=num_tokens))


def random_prompt(vocabulary: Vocabulary, index: int, num_tokens: int) -> tuple[int, ...]:
    """A unique prompt."""
    return vocabulary.draw(num_tokens, "unique", index)


def shared_prefix_prompt(
    vocabulary: Vocabulary, index: int, num_tokens: int, *, prefix_tokens: int, num_prefixes: int
) -> tuple[int, ...]:
    """One of `num_prefixes` prefixes, taken in turn, and `num_tokens` tokens of its own."""
    prefix = vocabulary.draw(prefix_tokens, "prefix", index % num_prefixes)
    return prefix + random_prompt(vocabulary, index, num_tokens)


def block_prompt(
    vocabulary: Vocabulary, index: int, num_tokens: int, *, block_ids: Sequence[int], block_tokens: int
) -> tuple[int, ...]:
    """Blocks of `block_tokens` tokens cut to `num_tokens`: equal block ids are equal tokens.

    Tokens beyond the blocks are the request's own.
    """
    num_blocks = min(len(block_ids), ceil_div(num_tokens, block_tokens))
    tokens: list[int] = []
    for block in block_ids[:num_blocks]:
        tokens += vocabulary.draw(block_tokens, "block", block)
    own = vocabulary.draw(max(0, num_tokens - len(tokens)), "unique", index)
    return (*tokens[:num_tokens], *own)


def as_text(prompt: Sequence[int]) -> str:
    """The words of a prompt, for endpoints that take text only. About one token a word."""
    return " ".join(WORDS[token % len(WORDS)] for token in prompt)
