"""Lengths of requests, and the mean time of a token. Owned by `request_traces`; one event loop."""

from __future__ import annotations

from baton.telemetry import metrics
from baton.telemetry.request_trace import Outcome, RequestTrace

_observe_prompt = metrics.PROMPT_LENGTH_TOKENS.labels().observe
_observe_output = metrics.OUTPUT_LENGTH_TOKENS.labels().observe
_observe_tpot = metrics.TPOT_SECONDS.labels().observe


def observe(trace: RequestTrace) -> None:
    """Records one request that has ended, unless it was refused."""
    if trace.outcome is Outcome.REFUSED:
        return
    _observe_prompt(trace.prompt_tokens)
    for sequence in trace.sequences:
        _observe_output(sequence.output_tokens)
        first_us, last_us = sequence.first_token_us, sequence.last_token_us
        if first_us is not None and last_us is not None and sequence.output_tokens > 1:
            _observe_tpot(1e-6 * (last_us - first_us) / (sequence.output_tokens - 1))
