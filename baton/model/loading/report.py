"""What loading found out: for the log, and kept with ready weights."""

from __future__ import annotations

from dataclasses import dataclass

from baton.model.linears.packing import WeightLayout
from baton.model.loading.quantization import QuantizationReport
from baton.model.loading.self_check import CheckResult, VerificationBits
from baton.model.smaps import WeightMemory


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Layout of the weights: `num_matrices` of them are in `layout`. `note`: the reason where they are plain."""

    layout: WeightLayout
    num_matrices: int
    note: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Results of loading, for the log.

    - `checkpoint_note`: what was done to stored weights that are not plain; empty where they are.
    - `stock_note`: why the stock module serves; empty for the lean decoder.
    - `kernel_note`: the kernels in use, or why there are none.
    - `memory`: the memory that the weights really lie in; None where the system does not tell.
    - `verification`: the result of `check_bits` where it is known from a weight file.
    - `sharing_note`: why their memory is not shared with other workers; empty where it is, or was not tried.
    - `check`: the self-check of the float model.
    - `quantization`: difference of the int8 model from the float model; None without quantisation.
    """

    seconds: float
    num_parameters: int
    checkpoint_note: str
    stock_note: str
    kernel_note: str
    weights: WeightReport
    memory: WeightMemory | None
    check: CheckResult
    quantization: QuantizationReport | None
    sharing_note: str = ""
    verification: VerificationBits | None = None

    @property
    def huge_fraction(self) -> float | None:
        """Share of the weights' bytes on huge pages; None where it is unknown."""
        return None if self.memory is None else self.memory.huge_fraction
