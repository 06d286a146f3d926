"""Hidden states of all tokens of a forward pass, taken between a model's layers while it runs.

Drafting heads read them: EAGLE-1 the output of the last norm, EAGLE-3 the residual stream between layers. Made for one
pass, filled by the decoder. A pass without a capture does nothing more than before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Which hidden states. `after`: numbers of layers, ascending; 0 gives the embeddings. `final`: after the last norm.

    Raises `ValueError` for numbers that do not ascend, and if nothing is taken.
    """

    after: tuple[int, ...] = ()
    final: bool = False

    def __post_init__(self) -> None:
        if any(number < 0 for number in self.after) or list(self.after) != sorted(set(self.after)):
            raise ValueError(f"layers to capture after must ascend from 0, and are {list(self.after)}")
        if not self.after and not self.final:
            raise ValueError("nothing is captured")

    @property
    def num_states(self) -> int:
        """Hidden states of each token."""
        return len(self.after) + self.final


class HiddenCapture:
    """The hidden states of one pass, in the order of the layers."""

    def __init__(self, spec: CaptureSpec) -> None:
        self.spec = spec
        self._states: list[torch.Tensor] = []

    def add(self, hidden: torch.Tensor) -> None:
        """Takes the next state [tokens, hidden_size] of the spec. It must not be overwritten afterwards."""
        self._states.append(hidden)

    def read(self) -> torch.Tensor:
        """All states side by side: [tokens, num_states * hidden_size]. Raises `ValueError` if some are missing."""
        if len(self._states) != self.spec.num_states:
            raise ValueError(f"{len(self._states)} of {self.spec.num_states} hidden states were captured")
        return self._states[0] if len(self._states) == 1 else torch.cat(self._states, dim=-1)
