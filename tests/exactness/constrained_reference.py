"""Constrained tokens of a stock Hugging Face model, from its logits and llguidance's own bitmask, step by step.

Shares no code with the cluster's sampling: edits, mask, noise and draw are written out here, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import transformers
from llguidance import LLMatcher

from baton.bundled import MODEL_DIR
from baton.grammar.tokenizer import GrammarTokenizer
from tests.tiny_models import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling of the reference, in the names of the API. `logit_bias`: token -> bias."""

    temperature: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def parameters(self) -> dict[str, float | int]:
        """As fields of a request."""
        return {
            "temperature": self.temperature,
            "seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
        }


class ConstrainedReference:
    """A float32 model without a cache. It computes each answer once: both transports are compared with it."""

    def __init__(self, directory: Path = MODEL_DIR) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._tokenizer = GrammarTokenizer.of_directory(MODEL_DIR, VOCAB_SIZE)
        self._answers: dict[tuple[object, ...], tuple[list[int], list[float]]] = {}

    def generate(
        self, grammar: str | None, prompt: Sequence[int], max_tokens: int, draw: Draw | None = None
    ) -> tuple[list[int], list[float]]:
        """Tokens up to an end token, which is the last one, or `max_tokens`; and their raw log probabilities."""
        asked = (grammar, tuple(prompt), max_tokens, draw or Draw())
        if asked not in self._answers:
            self._answers[asked] = self._generate(*asked)
        tokens, logprobs = self._answers[asked]
        return [*tokens], [*logprobs]

    def _generate(
        self, grammar: str | None, prompt: Sequence[int], max_tokens: int, draw: Draw
    ) -> tuple[list[int], list[float]]:
        matcher = None if grammar is None else LLMatcher(self._tokenizer.ll, grammar)
        output: list[int] = []
        logprobs: list[float] = []
        while len(output) < max_tokens:
            raw = self._logits([*prompt, *output])
            allowed = np.ones(VOCAB_SIZE, np.uint8)
            if matcher is not None:
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                allowed = np.unpackbits(bits, bitorder="little")[:VOCAB_SIZE]
            allowed &= _unbanned(output, draw)
            if len(output) < draw.min_tokens and allowed.sum() > sum(allowed[token] for token in self._tokenizer.eos):
                allowed[list(self._tokenizer.eos)] = 0
            edited = np.where(allowed == 1, _edited(raw, prompt, output, draw), -np.inf)
            token = int(edited.argmax()) if draw.temperature == 0 else _drawn(edited, draw, len(prompt) + len(output))
            output.append(token)
            logprobs.append(float(raw[token] - np.logaddexp.reduce(raw)))
            if token in self._tokenizer.eos:
                break
            assert matcher is None or matcher.consume_token(token)
        return output, logprobs

    def _logits(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)])).logits[0, -1]
        return np.asarray(logits.double().numpy())


def _unbanned(output: Sequence[int], draw: Draw) -> np.ndarray:
    """1 for each token that may follow: an allowed one that ends no bad word."""
    may = np.zeros(VOCAB_SIZE, np.uint8)
    may[list(draw.allowed) if draw.allowed else slice(None)] = 1
    for *head, last in draw.bad_words:
        if len(head) <= len(output) and list(output)[len(output) - len(head) :] == head:
            may[last] = 0
    return may


def _edited(raw: np.ndarray, prompt: Sequence[int], output: Sequence[int], draw: Draw) -> np.ndarray:
    edited = raw.copy()
    for token in {*prompt, *output}:
        factor = draw.repetition_penalty
        edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
    for token in output:
        edited[token] -= draw.frequency_penalty
    for token in {*output}:
        edited[token] -= draw.presence_penalty
    return edited


def _filtered(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """Minus infinity for tokens outside of the top k, then of the nucleus of what is left, then below the floor."""
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits[order] - logits[order[0]])
    if draw.top_k:
        probs[draw.top_k :] = 0.0
    before = np.concatenate(([0.0], np.cumsum(probs)[:-1]))
    kept = (before < draw.top_p * probs.sum()) & (probs >= draw.min_p) & (probs > 0)
    filtered = np.full_like(logits, -np.inf)
    filtered[order[kept]] = logits[order[kept]]
    return filtered


def _drawn(logits: np.ndarray, draw: Draw, position: int) -> int:
    """Gumbel-max with the noise of sampler version 2: 32 bits of (seed, position, token)."""
    digest = blake2b(f"{draw.seed}:{position}".encode(), digest_size=8, person=b"baton-sample").digest()
    low, high = np.frombuffer(digest, "<u4")
    bits = np.arange(len(logits), dtype=np.uint32) * np.uint32(0x9E3779B9) + low
    bits = (bits ^ bits >> 16) * np.uint32(0x7FEB352D)
    bits = ((bits ^ bits >> 15) + high) * np.uint32(0x846CA68B)
    bits ^= bits >> 16
    gumbels = -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))
    return int(np.argmax(_filtered(logits / draw.temperature, draw) + gumbels))
