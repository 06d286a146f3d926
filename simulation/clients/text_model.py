"""The text side of the simulated model: token n is the word `wn`, so a text shows its tokens.

Used by `router` as its text model, and by `answer` to find where a stop string ends a text.
"""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from baton.services.router.text.text_model import TextModel
from simulation.policies import CONFIG
from simulation.scenario import VOCAB_SIZE


@cache
def text_model() -> TextModel:
    """A shared instance; it is immutable."""
    words = {token_text(token): token for token in range(VOCAB_SIZE)}
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONFIG.max_model_len}
    return TextModel(Tokenizer(WordLevel(words, unk_token=token_text(0))), {}, config, None)


def token_text(token: int) -> str:
    """The text of a token."""
    return f"w{token}"
