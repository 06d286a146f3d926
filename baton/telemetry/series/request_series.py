"""Lengths of requests, and the mean time of a token. Owned by `request_traces`; one event loop."""

from __future__ import annotations

from baton.telemetry import metrics
from baton.telemetry.request_trace import Outcome, RequestTrace


def observe(trace: RequestTrace) -> None:
    """Records one request that has ended, unless it was refused."""
    if trace.outcome is Outcome.REFUSED:
        return
    metrics.PROMPT_LENGTH_TOKENS.observe(trace.prompt_tokens)
    for sequence in trace.sequences:
        metrics.OUTPUT_LENGTH_TOKENS.observe(sequence.output_tokens)
        first_us, last_us = sequence.first_token_us, sequence.last_token_us
        if first_us is not None and last_us is not None and sequence.output_tokens > 1:
            metrics.TPOT_SECONDS.observe(1e-6 * (last_us - first_us) / (sequence.output_tokens - 1))
