"""What a pair of workers costs a request, in prefill tokens. Pure.

Workers announce what they have learned of the time of their steps (`StepTimeFit`). By that a prompt that decode
computes itself is compared with one that is handed over: the time to its first token, and what its chunks cost the rows
beside them. Seconds become tokens at the rate of the fastest prefill among the candidates, so loads, caches, occupancy
and affinity are in one unit. A worker without a fit, and a link of unknown speed, count by the constants below.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.domain.timing.step_time import StepShape, StepTimeFit
from baton.domain.worker import WorkerRecord

MOVED_TOKENS_PER_COMPUTED = 16
"""Without a link's speed: moving the KV of this many tokens costs as much as computing one."""

LOCAL_TOKENS_PER_COMPUTED = 4
"""Without a fit: a prompt token that decode computes costs as much as this many at prefill. It waits for its share of
the steps, and all rows wait for it."""


class CostBasis(enum.Enum):
    """What a pair's cost goes by: a fit of the worker that computes the prompt, or constants."""

    PREDICTED = "predicted"
    CONSTANTS = "constants"

    __hash__ = object.__hash__  # members are singletons; that of `Enum` hashes their names, in Python


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """What one request asks of a pair: `num_tokens` to prefill, and how many of them each worker has cached."""

    num_tokens: int
    num_prefill_hit: int
    num_decode_hit: int


def basis_of(prefill: WorkerRecord) -> CostBasis:
    """What the cost of prompts at this worker goes by."""
    return CostBasis.CONSTANTS if usable_fit(prefill) is None else CostBasis.PREDICTED


def token_seconds(prefills: Iterable[WorkerRecord]) -> float:
    """Seconds of a prompt token in a first full chunk at the fastest of `prefills`; 0.0 while none has a fit."""
    best = math.inf
    for record in prefills:
        if (fit := usable_fit(record)) is not None:
            chunk = max(1, record.budgets.prefill_tokens)
            best = min(best, fit.seconds_of(chunk, 0, chunk) / chunk)
    return 0.0 if math.isinf(best) else best


def handover_cost(prefill: WorkerRecord, decode: WorkerRecord, work: PromptLoad, token_s: float) -> float:
    """Prefill tokens of a prompt that `prefill` computes, behind what waits there, and that moves to `decode`."""
    fit, waiting = usable_fit(prefill), prefill.load.waiting_tokens
    computed: float = waiting + work.num_tokens - work.num_prefill_hit
    if fit is not None and token_s:
        chunk = prefill.budgets.prefill_tokens
        seconds = fit.seconds_of(waiting, 0, chunk, num_prompts=prefill.load.waiting_requests)
        seconds += fit.seconds_of(work.num_tokens - work.num_prefill_hit, work.num_prefill_hit, chunk)
        computed = seconds / token_s
    num_moved = work.num_tokens - work.num_decode_hit
    bandwidth = _bandwidth(prefill, decode) if token_s else 0.0
    if not bandwidth or not decode.page_bytes:
        return computed + num_moved / MOVED_TOKENS_PER_COMPUTED
    return computed + num_moved * decode.page_bytes / decode.page_size / bandwidth / token_s


def local_cost(decode: WorkerRecord, work: PromptLoad, token_s: float) -> float:
    """Prefill tokens of a prompt that `decode` computes beside its rows, behind the prompts that wait there.

    The time to the first token, and what that adds to the time between tokens, times the rows. One row counts in any
    case: others may come while the prompt is computed.
    """
    fit, load = usable_fit(decode), decode.load
    num_tokens = work.num_tokens - work.num_decode_hit
    if fit is None or not token_s:
        return LOCAL_TOKENS_PER_COMPUTED * (load.waiting_tokens + num_tokens)
    return _local_seconds(fit, decode, num_tokens, work.num_decode_hit) / token_s


def usable_fit(record: WorkerRecord) -> StepTimeFit | None:
    """The step times that a worker announces; None if there are none, or none to go by."""
    fit = record.load.step_time
    return fit if fit is not None and fit.usable else None


def _local_seconds(fit: StepTimeFit, decode: WorkerRecord, num_tokens: int, start: int) -> float:
    load, rows = decode.load, decode.load.running_rows
    beside = StepShape(rows, 0.0, load.pages.live * decode.page_size)
    chunk = max(decode.page_size, decode.budgets.prefill_tokens - rows)
    first_s = fit.seconds_of(load.waiting_tokens, 0, chunk, beside, load.waiting_requests)
    first_s += fit.seconds_of(num_tokens, start, chunk, beside)
    num_steps = ceil_div(load.waiting_tokens, chunk) + ceil_div(num_tokens, chunk)
    added_s = max(0.0, first_s - num_steps * fit.seconds_of_rows(beside))
    return first_s + max(1, rows) * added_s


def _bandwidth(prefill: WorkerRecord, decode: WorkerRecord) -> float:
    """Bytes a second of the link between two workers: of its pulls, else of its probe; 0.0 if it is not known."""
    for link in decode.links:
        if link.prefill_incarnation == prefill.incarnation:
            if link.num_pulled_bytes > 0 and link.pull_us > 0:
                return 1e6 * link.num_pulled_bytes / link.pull_us
            return link.bandwidth_bytes_per_s
    return 0.0
