"""Plans the requests of a run from its options. Called by `commands`; equal options give equal plans.

Lengths and prefixes come from `prompts` and `traces`, times from `arrivals`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from baton.services.cli.bench.options import Dataset, ServeOptions
from baton.services.cli.bench.results.records import PlannedRequest
from baton.services.cli.bench.workload.arrivals import gamma_arrivals, jitter, stamp_resolution
from baton.services.cli.bench.workload.prompts import Vocabulary, block_prompt, random_prompt, shared_prefix_prompt
from baton.services.cli.bench.workload.traces import TraceRow, read_azure, read_mooncake, scale, scaled_block_tokens
from baton.settings.base import SettingsError


def plan_requests(options: ServeOptions) -> list[PlannedRequest]:
    """The run's requests in order of arrival. Raises `TraceError`, `SettingsError`, `OSError`."""
    vocabulary = _vocabulary(options)
    if options.dataset_name in (Dataset.MOONCAKE, Dataset.AZURE):
        return _replay(options, vocabulary, _read(options))
    arrivals = _arrivals(options, options.num_prompts)
    return [
        PlannedRequest(index, arrival, _prompt(options, vocabulary, index), options.random_output_len)
        for index, arrival in enumerate(arrivals)
    ]


def plan_warmups(options: ServeOptions) -> list[PlannedRequest]:
    """Requests that share no token with the run, so they warm no prefix cache."""
    vocabulary = _vocabulary(options)
    return [
        PlannedRequest(-1 - n, 0.0, vocabulary.draw(32, "warmup", n), min(8, options.random_output_len))
        for n in range(options.num_warmups)
    ]


def _vocabulary(options: ServeOptions) -> Vocabulary:
    try:
        return Vocabulary(options.vocab_size, options.seed)
    except ValueError as error:
        raise SettingsError(f"--vocab-size {options.vocab_size}", why=str(error), hint="Raise it.") from None


def _prompt(options: ServeOptions, vocabulary: Vocabulary, index: int) -> tuple[int, ...]:
    if options.dataset_name is Dataset.RANDOM:
        return random_prompt(vocabulary, index, options.random_input_len)
    return shared_prefix_prompt(
        vocabulary,
        index,
        options.random_input_len,
        prefix_tokens=options.random_prefix_len,
        num_prefixes=options.num_prefixes,
    )


def _arrivals(options: ServeOptions, num_requests: int) -> list[float]:
    rate = math.inf if options.request_rate is None else options.request_rate
    return gamma_arrivals(num_requests, rate, options.burstiness, random.Random(f"{options.seed}/arrivals"))


def _read(options: ServeOptions) -> list[TraceRow]:
    """The whole trace, scaled; many stamps are needed to detect their resolution."""
    read = read_mooncake if options.dataset_name is Dataset.MOONCAKE else read_azure
    rows = read(Path(str(options.dataset_path)))
    return scale(rows, length=options.scale_length, rate=options.scale_rate)


def _replay(options: ServeOptions, vocabulary: Vocabulary, rows: Sequence[TraceRow]) -> list[PlannedRequest]:
    """The trace's first `num_prompts` requests. Jitter is applied to the whole trace first."""
    if options.request_rate is not None:
        arrivals = _arrivals(options, min(options.num_prompts, len(rows)))
    else:
        stamps = [row.arrival_s for row in rows]
        arrivals = jitter(stamps, stamp_resolution(stamps), random.Random(f"{options.seed}/jitter"))[
            : options.num_prompts
        ]
    block_tokens = scaled_block_tokens(options.scale_length)
    return [
        PlannedRequest(
            index,
            arrival,
            block_prompt(vocabulary, index, row.num_input_tokens, block_ids=row.block_ids, block_tokens=block_tokens),
            row.num_output_tokens,
        )
        for index, (row, arrival) in enumerate(zip(rows[: options.num_prompts], arrivals, strict=True))
    ]
