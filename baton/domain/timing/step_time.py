"""Predicts the seconds of an engine step from its shape, fitted online. Pure; standard library only.

Recursive least squares with forgetting (Plackett; Ljung and Soederstroem) on the relative error of seven features.
A forward pass costs a constant, a part for each new token that falls with their number (weights are read once, then
products dominate), and attention: of chunks to what they follow, and of single tokens to their contexts. All weights
follow sudden changes of speed (throttling, other threads) together, which forgetting alone follows over hundreds of
steps. Squares of relative errors settle below the mean of uneven times: what such times are off by in the long run is
no change of speed, and does not count as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul, truediv

from baton.domain.arithmetic import ceil_div

KNEES = (4, 16, 64)
"""Numbers of new tokens at which the cost of one more may change."""
UNITS = (1.0, 16.0, 16.0, 64.0, 256.0, 65_536.0, 4_096.0)
"""What a feature is counted in, so that all are of one magnitude."""

FORGETTING = 0.995
INITIAL_VARIANCE = 100.0
MAX_TRACE = 1e4
"""Bound of the estimate's variance: without it, steps of one shape alone let it grow without end."""
SPEED_GAIN = 0.1
OFFSET_GAIN = 0.005
ERROR_GAIN = 0.05
MIN_STEPS = 8
MAX_ERROR = 0.25
"""A model with a larger mean error is not reliable."""
MIN_STEP_S = 1e-6

_SIZE = len(UNITS)
_PAIRS = [(i, j) for i in range(_SIZE) for j in range(i, _SIZE)]
"""Entries of the covariance that are kept, as it is symmetric. Picked by C functions: the work of each step counts."""
_of_first, _of_second = (itemgetter(*indices) for indices in zip(*_PAIRS, strict=True))
_of_rows = [itemgetter(*(_PAIRS.index((min(i, j), max(i, j))) for j in range(_SIZE))) for i in range(_SIZE)]
_of_diagonal = itemgetter(*(_PAIRS.index((i, i)) for i in range(_SIZE)))

Segment = tuple[int, int]
"""New tokens of one row, and the number of tokens before them."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it.

    `num_tokens`: new tokens. `chunk_pairs`: pairs of a token of a chunk and a token that it attends to.
    `row_contexts`: summed contexts of the rows with one new token.
    """

    num_tokens: int
    chunk_pairs: float
    row_contexts: int

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> StepShape:
        """The shape of a step with these rows and chunks."""
        num_tokens, pairs, contexts = 0, 0.0, 0
        for count, start in segments:
            num_tokens += count
            if count == 1:
                contexts += start + 1
            else:
                pairs += count * (start + count / 2)
        return cls(num_tokens, pairs, contexts)

    def with_chunk(self, num_tokens: int, start: int) -> StepShape:
        """This step with one chunk more."""
        other = StepShape.of([(num_tokens, start)])
        return StepShape(
            self.num_tokens + other.num_tokens,
            self.chunk_pairs + other.chunk_pairs,
            self.row_contexts + other.row_contexts,
        )

    def features(self) -> tuple[float, ...]:
        """The seven features, in `UNITS`."""
        knees = [max(0, self.num_tokens - knee) for knee in KNEES]
        values = (1.0, self.num_tokens, *knees, self.chunk_pairs, self.row_contexts)
        return tuple(map(truediv, values, UNITS))


EMPTY_STEP = StepShape(0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """What a reliable model has learned, as a value that travels in a worker's record.

    `weights`: seconds of each feature in `UNITS`. `least_s`: no step takes less.
    """

    weights: tuple[float, ...]
    least_s: float

    @property
    def usable(self) -> bool:
        """True if it has this version's features and no prompt gets cheaper by being longer.

        Squares are fitted without bounds, and a record may come from another version.
        """
        if len(self.weights) != len(UNITS) or not all(map(math.isfinite, (*self.weights, self.least_s))):
            return False
        per_unit: list[float] = list(map(truediv, self.weights, UNITS))
        slopes = [*accumulate(per_unit[1 : 2 + len(KNEES)]), per_unit[-2]]
        return min(slopes) >= 0.0

    def seconds_of(
        self, num_tokens: int, start: int, chunk_tokens: int, beside: StepShape = EMPTY_STEP, num_prompts: int = 1
    ) -> float:
        """Seconds to compute `num_tokens` tokens after the first `start`, in chunks of `chunk_tokens`.

        `beside`: the rows in each of these steps. `num_prompts`: as many of one length, packed into full chunks. In one
        sum: features are linear between the knees.
        """
        if num_tokens <= 0:
            return 0.0
        num_full, rest = divmod(num_tokens, max(1, chunk_tokens))
        num_steps, rows = num_full + (rest > 0), beside.num_tokens
        values = [float(num_steps), num_tokens + num_steps * rows]
        for knee in KNEES:
            of_full, of_rest = max(0, chunk_tokens + rows - knee), max(0, rest + rows - knee) if rest else 0
            values.append(num_full * of_full + of_rest)
        values.append(num_tokens * (start + num_tokens / max(1, num_prompts) / 2) + num_steps * beside.chunk_pairs)
        values.append(num_steps * beside.row_contexts)
        seconds = sum(w * x / unit for w, x, unit in zip(self.weights, values, UNITS, strict=True))
        return max(seconds, num_steps * self.least_s)

    def seconds_of_rows(self, beside: StepShape) -> float:
        """Seconds of a step with these rows alone; 0.0 without any."""
        if not beside.num_tokens:
            return 0.0
        return max(sum(w * x for w, x in zip(self.weights, beside.features(), strict=True)), self.least_s)


class StepTimeModel:
    """Learns from every step of one worker. Owned by its engine thread."""

    def __init__(self) -> None:
        self._weights = [0.0] * _SIZE
        self._covariance = [INITIAL_VARIANCE * (i == j) for i, j in _PAIRS]
        self._offset = 0.0  # mean of what steps are off by, as a logarithm
        self._least_s = math.inf
        self.num_steps = self.num_chunk_steps = 0
        self.error = 1.0

    @property
    def reliable(self) -> bool:
        """True after `MIN_STEPS` steps while the mean relative error is at most `MAX_ERROR`."""
        return self.num_steps >= MIN_STEPS and self.error <= MAX_ERROR

    def fit(self) -> StepTimeFit | None:
        """What was learned; None until it is reliable, also for chunks, and usable.

        Thread-safe: weights are replaced.
        """
        if not self.reliable or self.num_chunk_steps < MIN_STEPS:
            return None
        fit = StepTimeFit(tuple(self._weights), self._least_s / 2)
        return fit if fit.usable else None

    def observe(self, shape: StepShape, seconds: float, *, has_prompt: bool = True) -> None:
        """Learns that a step took `seconds`. Steps without tokens, or that no clock saw pass, are ignored.

        `has_prompt`: tokens of prompts are among its chunks; without, they are rows with drafts.
        """
        if shape.num_tokens == 0 or seconds < MIN_STEP_S:
            return
        features = shape.features()
        if self.num_steps > 0:
            ratio = seconds / self._predict(features)
            gain = ERROR_GAIN if self.num_steps > MIN_STEPS else 1 / self.num_steps
            self.error += gain * (min(1.0, abs(1 / ratio - 1)) - self.error)
            if self.num_steps > MIN_STEPS:
                off = max(-1.0, min(1.0, math.log(ratio)))
                factor = math.exp(SPEED_GAIN * (off - self._offset))
                self._weights = [factor * weight for weight in self._weights]
                self._offset += OFFSET_GAIN * (off - self._offset)
        self._fit(features, seconds)
        self._least_s = min(self._least_s, seconds)
        self.num_steps += 1
        self.num_chunk_steps += has_prompt and shape.chunk_pairs > 0

    def predict(self, shape: StepShape) -> float:
        """Seconds of a step: at least half of the shortest one seen. 0.0 before the first step."""
        return 0.0 if self.num_steps == 0 else self._predict(shape.features())

    def seconds_of(self, num_tokens: int, start: int, chunk_tokens: int) -> float:
        """Seconds to compute `num_tokens` tokens after the first `start`, alone, in chunks of `chunk_tokens`."""
        num_chunks = ceil_div(num_tokens, chunk_tokens)
        sizes = [min(chunk_tokens, num_tokens - chunk * chunk_tokens) for chunk in range(num_chunks)]
        return sum(
            self.predict(EMPTY_STEP.with_chunk(size, start + chunk * chunk_tokens)) for chunk, size in enumerate(sizes)
        )

    def largest_chunk(self, target_s: float, beside: StepShape, start: int, max_tokens: int) -> int:
        """The most tokens after the first `start` with which the step `beside` stays within `target_s`; 0 if none do.

        `max_tokens`: the largest answer.
        """
        if max_tokens <= 0 or self.predict(beside.with_chunk(max_tokens, start)) <= target_s:
            return max(0, max_tokens)
        low, high = 0, max_tokens - 1  # `low` fits or is 0
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(beside.with_chunk(middle, start)) <= target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _predict(self, features: tuple[float, ...]) -> float:
        parts: list[float] = list(map(mul, self._weights, features))
        return max(sum(parts), self._least_s / 2)

    def _fit(self, features: tuple[float, ...], seconds: float) -> None:
        """One step of recursive least squares: the weights times `features / seconds` shall be 1."""
        x, covariance = [value / seconds for value in features], self._covariance
        spread = [sum(map(mul, row(covariance), x)) for row in _of_rows]
        gain_over = FORGETTING + sum(map(mul, x, spread))
        miss = 1.0 - sum(map(mul, self._weights, x))
        self._weights = [weight + one / gain_over * miss for weight, one in zip(self._weights, spread, strict=True)]
        left = zip(covariance, _of_first(spread), _of_second(spread), strict=True)
        reduced = [value - one * other / gain_over for value, one, other in left]
        trace = sum(_of_diagonal(reduced))
        factor = min(1 / FORGETTING, max(1.0, MAX_TRACE / trace)) if trace > 0 else 1.0
        self._covariance = reduced if factor == 1.0 else [value * factor for value in reduced]
