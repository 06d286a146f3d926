"""Quantises a model at load, checks the requirements, and measures the difference from the float model.

Called by `load_model` after the float model passed the self-check. The arithmetic is in `baton.model.linears.int8`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.model.decoders.lean_weights import LeanModel
from baton.model.errors import UnsupportedModel
from baton.model.kernels.library import Kernels
from baton.model.loading.kernel_choice import KernelChoice

MAX_ERROR = 0.5
"""Largest error of logits, in their standard deviations. Unrelated models differ by 1.4, quantised ones by under 0.1.
"""

_FIX_HINT = "Use quantization none"


class Quantization(enum.Enum):
    """Format of the lean decoder's matrices. Embeddings, norms and experts are never quantised."""

    NONE = "none"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """Number of quantised matrices, and their effect over the prompts of the self-check.

    `error`: the median token's root mean square difference of logits, in their standard deviations. `divergence`: the
    mean Kullback-Leibler divergence of next-token distributions from the float model's, in nats.
    """

    num_linears: int
    error: float
    divergence: float


def require_int8_support(choice: KernelChoice, device: str) -> None:
    """Raises `UnsupportedModel` where no int8 products are available."""
    if device != "cpu":
        raise UnsupportedModel(f"no int8 weights on {device}: only the CPU kernels multiply with them. {_FIX_HINT}")
    _kernels_of(choice)


def quantize(
    impl: torch.nn.Module | LeanModel,
    stock_note: str,
    choice: KernelChoice,
    logits: Callable[[LeanModel], torch.Tensor],
) -> QuantizationReport:
    """Quantises `impl` for good. `logits` runs it on the self-check's prompts: [tokens, vocab_size], float32.

    Raises `UnsupportedModel` for a stock module, for a weight that is not finite, and for a result far from the float
    model's.
    """
    if not isinstance(impl, LeanModel):
        raise UnsupportedModel(f"no int8 weights: only the lean decoder has them, and {stock_note}. {_FIX_HINT}")
    kernels, before = _kernels_of(choice), logits(impl)
    try:
        num_linears = impl.quantize(kernels)
    except ValueError as error:
        raise UnsupportedModel(f"no int8 weights: {error}. {_FIX_HINT}") from error
    report = compare(before, logits(impl), num_linears)
    if not report.error <= MAX_ERROR:  # a NaN fails
        raise UnsupportedModel(
            f"with int8 weights logits differ from the float model's by {report.error:.2g} standard deviations, more "
            f"than {MAX_ERROR:g}: it would be another model. Use quantization none"
        )
    return report


def _kernels_of(choice: KernelChoice) -> Kernels:
    if choice.kernels is None:
        raise UnsupportedModel(f"no int8 weights: only native kernels multiply with them; {choice.note}. {_FIX_HINT}")
    return choice.kernels


def compare(before: torch.Tensor, after: torch.Tensor, num_linears: int) -> QuantizationReport:
    """The report on logits [tokens, vocab_size] before and after."""
    errors = (after - before).square().mean(-1).sqrt() / before.std(-1)
    return QuantizationReport(num_linears, errors.median().item(), divergences(before, after).mean().item())


def divergences(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of every token's distribution in nats: logits [tokens, vocab_size] -> [tokens]."""
    true, other = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (true.exp() * (true - other)).sum(-1)
