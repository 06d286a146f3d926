"""Draws a token by the Gumbel-max trick, with noise that is keyed by (seed, position, token id).

The token has the largest log weight + G, where every token has its own standard Gumbel number G. Two distributions that
are drawn with one key agree with a chance of at least (1 - d) / (1 + d), where d is the total variation between them
(Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978).
That is how drafts are accepted. Pure functions of tensors on any device, called by the sampler. `sampling.cpp` computes
the same numbers, rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from baton.model.to_device import int64_tensor

_STRIDE, _FIRST, _SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
_LARGEST = 1.0 - 2.0**-24
"""The float32 below 1: its exponential number is finite."""


def draw_key(seed: int, position: int) -> int:
    """64 bits of BLAKE2b for (seed, position), equal in every process and attempt."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"baton-sample").digest()
    return int.from_bytes(digest, "little")


def exponentials(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard exponential numbers, float32 [rows, vocab_size], by key and token id.

    Each is -log(1 - u), where u is (bits + 1/2) / 2^32. The bits are a permutation of 32-bit numbers with two rounds of
    multiply and xorshift (constants: Wellons, "hash-prospector", lowbias32). Each half of the key enters one round.
    """
    low, high = (int64_tensor([_signed(key >> shift) for key in keys], device).int()[:, None] for shift in (0, 32))
    bits = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(_STRIDE) + low
    bits = (bits ^ _shifted(bits, 16)).mul_(_signed(_FIRST))
    bits = (bits ^ _shifted(bits, 15)).add_(high).mul_(_signed(_SECOND))
    bits ^= _shifted(bits, 16)
    uniforms = bits.float().add_(0.5)
    uniforms += bits.lt(0) * 2.0**32  # torch reads them as signed
    return uniforms.mul_(2.0**-32).clamp_(max=_LARGEST).neg_().log1p_().neg_()


def sample_by_gumbel(weights: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """Token ids [rows] drawn from `weights` [rows, vocab_size], which need not sum to 1. Of weight 0: never.

    An exponential number is e^-G, so the largest weight / number is the largest log weight + G, one logarithm cheaper.
    """
    return exponentials(keys, weights.shape[-1], weights.device).reciprocal_().mul_(weights).argmax(-1)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shifted to the right as unsigned numbers are; torch's own shift keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed(number: int) -> int:
    """The int32 of the low 32 bits."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
