"""The loads of the comparison, and the figures computed from their results. Called by `bench.peers.compare`.

A load is one run of `baton bench serve`; every figure is computed from its `LoadResult`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.results.records import RequestRow
from baton.services.cli.bench.results.run_file import load
from bench.harness.rotations import Block
from bench.peers.servers import PeerServer

ERROR_TAIL_CHARS = 400
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Flags of `baton bench serve`; lengths in tokens."""

    name: str
    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_concurrency: int

    @property
    def flags(self) -> tuple[str, ...]:
        lengths = (
            *("--random-input-len", str(self.num_prompt_tokens)),
            *("--random-output-len", str(self.num_output_tokens)),
        )
        return ("--num-prompts", str(self.num_prompts), *lengths, "--max-concurrency", str(self.max_concurrency))

    @property
    def warm_up(self) -> PeerLoad:
        """The same load with one short answer a stream."""
        short = min(self.num_output_tokens, WARM_UP_TOKENS)
        return replace(self, num_prompts=self.max_concurrency, num_output_tokens=short)


PROMPT_128 = PeerLoad("prompt of 128", 4, 128, 2, 1)
PROMPT_861 = PeerLoad("prompt of 861", 3, 861, 2, 1)
PROMPT_2048 = PeerLoad("prompt of 2048", 2, 2048, 2, 1)
BURST = PeerLoad("8 prompts of 64 at once", 8, 64, 2, 8)
ONE_STREAM = PeerLoad("one stream", 2, 16, 48, 1)
EIGHT_STREAMS = PeerLoad("8 streams", 8, 16, 96, 8)
SIXTEEN_STREAMS = PeerLoad("16 streams", 16, 16, 64, 16)
LOADS = (PROMPT_128, PROMPT_861, PROMPT_2048, BURST, ONE_STREAM, EIGHT_STREAMS, SIXTEEN_STREAMS)

BESIDE_PROMPTS = "streams beside long prompts"
"""Load of `bench.peers.beside_prompts`."""


class RequestResult(NamedTuple):
    """One request: TTFT and TPOT in seconds, and tokens, as the server counts them."""

    ttft_s: float
    tpot_s: float
    num_prompt_tokens: float
    num_output_tokens: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run of a load. `concurrent_rate`: tokens/s while all requests were decoding; 0 if they never were.

    `gap_p99_s`: 99th percentile of the gaps between tokens of all streams, in seconds; 0 if there were none.
    """

    wall_s: float
    concurrent_rate: float
    gap_p99_s: float
    outcomes: tuple[RequestResult, ...]

    @classmethod
    def of_rows(cls, rows: Sequence[RequestRow], gaps: Sequence[float] | None = None) -> Self:
        """`gaps`: those of other streams, in seconds; None: the requests' own.

        Raises `RuntimeError` if a request failed: a server that drops requests has less work.
        """
        if failed := [row.failure for row in rows if row.failure is not None]:
            raise RuntimeError(f"{len(failed)} of {len(rows)} requests failed: {failed[0]}")
        outcomes = (
            RequestResult(row.ttft_s, row.tpot_s or 0.0, row.num_prompt_tokens, row.num_output_tokens) for row in rows
        )
        if gaps is None:
            gaps = [gap for row in rows for gap in row.itls_s]
        return cls(
            max(row.sent_s + row.ended_s for row in rows),
            _concurrent_rate(rows),
            percentile(sorted(gaps), 99) if gaps else 0.0,
            tuple(outcomes),
        )

    @classmethod
    def of_block(cls, block: Block) -> Self:
        """The inverse of `values`."""
        wall_s, concurrent_rate, gap_p99_s, *flat = block.values
        width = len(RequestResult._fields)
        outcomes = (RequestResult(*flat[at : at + width]) for at in range(0, len(flat), width))
        return cls(wall_s, concurrent_rate, gap_p99_s, tuple(outcomes))

    @property
    def values(self) -> list[float]:
        """Values of a block: those of all requests, then every request's result, flat."""
        of_all = [self.wall_s, self.concurrent_rate, self.gap_p99_s]
        return [*of_all, *(value for outcome in self.outcomes for value in outcome)]


def _concurrent_rate(rows: Sequence[RequestRow]) -> float:
    began_s = max(row.sent_s + row.ttft_s for row in rows)
    ended_s = min(row.sent_s + row.ended_s for row in rows)
    if ended_s <= began_s:
        return 0.0
    events = ((row.sent_s + event.at_s, event.num_tokens) for row in rows for event in row.deliveries)
    return sum(num_tokens for at_s, num_tokens in events if began_s < at_s <= ended_s) / (ended_s - began_s)


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A line of the report for every server; `of` returns None where the block has no such figure.

    `load`: name of the load. `compared`: also reported as a peer's figure over Baton's: of a time or a size, so a ratio
    over 1 is Baton's gain, and one below 1 a line that Baton loses.
    """

    name: str
    unit: str
    load: str
    of: Callable[[Block], float | None]
    compared: bool = False


def _of_load(
    name: str, unit: str, load: str, of: Callable[[LoadResult], float | None], *, compared: bool = True
) -> ReportLine:
    return ReportLine(name, unit, load, lambda block: of(LoadResult.of_block(block)), compared)


def _ttft_ms(facts: LoadResult) -> float:
    return 1e3 * statistics.median(outcome.ttft_s for outcome in facts.outcomes)


def _last_ttft_ms(facts: LoadResult) -> float:
    return 1e3 * max(outcome.ttft_s for outcome in facts.outcomes)


def _tpot_ms(facts: LoadResult) -> float:
    return 1e3 * statistics.median(outcome.tpot_s for outcome in facts.outcomes)


def _gap_p99_ms(facts: LoadResult) -> float | None:
    return 1e3 * facts.gap_p99_s or None


def _concurrent_ms(facts: LoadResult) -> float | None:
    return 1e3 / facts.concurrent_rate if facts.concurrent_rate else None


def _ms_a_token_of_all(facts: LoadResult) -> float:
    return 1e3 * facts.wall_s / sum(outcome.num_output_tokens for outcome in facts.outcomes)


def _tokens_per_s(facts: LoadResult) -> float:
    return 1e3 / _ms_a_token_of_all(facts)


def _lines_of_streams(load: PeerLoad) -> tuple[ReportLine, ...]:
    name = load.name
    return (
        _of_load(f"{name}: TPOT", "ms", name, _tpot_ms),
        _of_load(f"{name}: p99 gap", "ms", name, _gap_p99_ms),
        _of_load(f"{name}: while all decode", "ms a token of all", name, _concurrent_ms),
        _of_load(f"{name}, prompts included", "ms a token of all", name, _ms_a_token_of_all),
        _of_load(f"{name}, prompts included: rate", "tokens/s", name, _tokens_per_s, compared=False),
    )


START = "start"
"""Not a load: its block has the seconds to readiness, and the bytes of all processes after the warm-up."""

REPORT_LINES = (
    *(
        _of_load(f"first token of {load.num_prompt_tokens} tokens", "ms", load.name, _ttft_ms)
        for load in (PROMPT_128, PROMPT_861, PROMPT_2048)
    ),
    _of_load("one stream", "ms a token", ONE_STREAM.name, _tpot_ms),
    *_lines_of_streams(EIGHT_STREAMS),
    *_lines_of_streams(SIXTEEN_STREAMS),
    _of_load(f"{BURST.name}: median first token", "ms", BURST.name, _ttft_ms),
    _of_load(f"{BURST.name}: last first token", "ms", BURST.name, _last_ttft_ms),
    _of_load(f"{BESIDE_PROMPTS}: p99 gap", "ms", BESIDE_PROMPTS, _gap_p99_ms),
    _of_load(f"{BESIDE_PROMPTS}: first token of a prompt", "ms", BESIDE_PROMPTS, _ttft_ms),
    ReportLine("start", "s", START, lambda block: block.values[0], compared=True),
    ReportLine("memory of all processes (PSS)", "MiB", START, lambda block: block.values[1] / 2**20, compared=True),
)


def measure(server: PeerServer, load_: PeerLoad, seed: int, directory: Path) -> list[float]:
    """Runs `baton bench serve` and returns the values of a block. Raises `RuntimeError` if it or a request fails."""
    name = f"{server.name}-{load_.name}.json".replace(" ", "-")
    asking = ("--endpoint", "completions", "--ignore-eos", "--no-continuous-usage", "--num-warmups", "0")
    saving = ("--save-result", "--result-dir", str(directory), "--result-filename", name)
    command = [sys.executable, "-m", "baton.services.cli.main", "bench", "serve", "--base-url", server.url]
    command += [*asking, "--seed", str(seed), *load_.flags, *saving]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"{server.name}, {load_.name}: {ran.stderr[-ERROR_TAIL_CHARS:]}")
    return LoadResult.of_rows(load(directory / name).rows).values
