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

from baton.services.cli.bench.results.records import RequestRow
from baton.services.cli.bench.results.run_file import load
from bench.harness.rotations import Block
from bench.peers.servers import PeerServer

ERROR_TAIL_CHARS = 400
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Flags of `baton bench serve`."""

    name: str
    num_prompts: int
    num_words: int
    num_output_tokens: int
    max_concurrency: int

    @property
    def flags(self) -> tuple[str, ...]:
        lengths = ("--random-input-len", str(self.num_words), "--random-output-len", str(self.num_output_tokens))
        return ("--num-prompts", str(self.num_prompts), *lengths, "--max-concurrency", str(self.max_concurrency))

    @property
    def warm_up(self) -> PeerLoad:
        """The same load with one short answer a stream."""
        short = min(self.num_output_tokens, WARM_UP_TOKENS)
        return replace(self, num_prompts=self.max_concurrency, num_output_tokens=short)


LONG_PROMPT = PeerLoad("long prompt", 3, 200, 2, 1)
ONE_STREAM = PeerLoad("one stream", 2, 16, 48, 1)
EIGHT_STREAMS = PeerLoad("eight streams", 8, 8, 96, 8)
LOADS = (LONG_PROMPT, ONE_STREAM, EIGHT_STREAMS)


class RequestResult(NamedTuple):
    """One request: TTFT and TPOT in seconds, and tokens; 0 prompt tokens if the server did not count them."""

    ttft_s: float
    tpot_s: float
    num_prompt_tokens: float
    num_output_tokens: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run of a load. `concurrent_rate`: tokens/s while all requests were decoding; 0 if they never were."""

    wall_s: float
    concurrent_rate: float
    outcomes: tuple[RequestResult, ...]

    @classmethod
    def of_rows(cls, rows: Sequence[RequestRow], num_words: int) -> Self:
        """Raises `RuntimeError` if a request failed: a server that drops requests has less work."""
        if failed := [row.failure for row in rows if row.failure is not None]:
            raise RuntimeError(f"{len(failed)} of {len(rows)} requests failed: {failed[0]}")
        outcomes = (
            RequestResult(row.ttft_s, row.tpot_s or 0.0, _num_prompt_tokens(row, num_words), row.num_output_tokens)
            for row in rows
        )
        return cls(max(row.sent_s + row.ended_s for row in rows), _concurrent_rate(rows), tuple(outcomes))

    @classmethod
    def of_block(cls, block: Block) -> Self:
        """The inverse of `values`."""
        wall_s, concurrent_rate, *flat = block.values
        width = len(RequestResult._fields)
        return cls(
            wall_s, concurrent_rate, tuple(RequestResult(*flat[at : at + width]) for at in range(0, len(flat), width))
        )

    @property
    def values(self) -> list[float]:
        """Values of a block: wall time and concurrent rate, then every request's result, flat."""
        return [self.wall_s, self.concurrent_rate, *(value for outcome in self.outcomes for value in outcome)]


def _num_prompt_tokens(row: RequestRow, num_words: int) -> int:
    """The server's count of the prompt, 0 if it gave none: the row then has the words, and a chat has more tokens."""
    return row.num_prompt_tokens if row.num_prompt_tokens > num_words else 0


def _concurrent_rate(rows: Sequence[RequestRow]) -> float:
    began_s = max(row.sent_s + row.ttft_s for row in rows)
    ended_s = min(row.sent_s + row.ended_s for row in rows)
    if ended_s <= began_s:
        return 0.0
    events = ((row.sent_s + event.at_s, event.num_tokens) for row in rows for event in row.deliveries)
    return sum(num_tokens for at_s, num_tokens in events if began_s < at_s <= ended_s) / (ended_s - began_s)


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A line of the report for every server; `of` returns None where the result has no such figure.

    `compared`: also reported as a peer's time over Baton's, so a ratio over 1 is Baton's gain.
    """

    name: str
    unit: str
    load: PeerLoad
    of: Callable[[LoadResult], float | None]
    compared: bool = False


def _ttft_ms(facts: LoadResult) -> float:
    return 1e3 * statistics.median(outcome.ttft_s for outcome in facts.outcomes)


def _prompt_tokens(facts: LoadResult) -> float | None:
    return statistics.median(outcome.num_prompt_tokens for outcome in facts.outcomes) or None


def _prefill(facts: LoadResult) -> float | None:
    return statistics.median(outcome.num_prompt_tokens / outcome.ttft_s for outcome in facts.outcomes) or None


def _tpot_ms(facts: LoadResult) -> float:
    return 1e3 * statistics.median(outcome.tpot_s for outcome in facts.outcomes)


def _decode(facts: LoadResult) -> float:
    return 1e3 / _tpot_ms(facts)


def _concurrent_ms(facts: LoadResult) -> float | None:
    return 1e3 / facts.concurrent_rate if facts.concurrent_rate else None


def _ms_a_token_of_all(facts: LoadResult) -> float:
    return 1e3 * facts.wall_s / sum(outcome.num_output_tokens for outcome in facts.outcomes)


REPORT_LINES = (
    ReportLine("input tokens of the long prompt", "tokens", LONG_PROMPT, _prompt_tokens),
    ReportLine("first token of a long prompt", "ms", LONG_PROMPT, _ttft_ms, compared=True),
    ReportLine("prefill", "tokens/s", LONG_PROMPT, _prefill),
    ReportLine("one stream", "ms a token", ONE_STREAM, _tpot_ms, compared=True),
    ReportLine("decode, one stream", "tokens/s", ONE_STREAM, _decode),
    ReportLine("eight streams at once", "ms a token of all", EIGHT_STREAMS, _concurrent_ms, compared=True),
    ReportLine("decode, eight streams at once", "tokens/s", EIGHT_STREAMS, lambda facts: facts.concurrent_rate or None),
    ReportLine(
        "eight streams, prompts included", "ms a token of all", EIGHT_STREAMS, _ms_a_token_of_all, compared=True
    ),
)


def measure(server: PeerServer, load_: PeerLoad, seed: int, directory: Path) -> list[float]:
    """Runs `baton bench serve` and returns the values of a block. Raises `RuntimeError` if it or a request fails."""
    name = f"{server.name}-{load_.name}.json".replace(" ", "-")
    asking = ("--endpoint", "chat", "--ignore-eos", "--no-continuous-usage", "--seed", str(seed))
    saving = ("--save-result", "--result-dir", str(directory), "--result-filename", name)
    command = [sys.executable, "-m", "baton.services.cli.main", "bench", "serve", "--base-url", server.url]
    command += [*asking, *load_.flags, *saving]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"{server.name}, {load_.name}: {ran.stderr[-ERROR_TAIL_CHARS:]}")
    return LoadResult.of_rows(load(directory / name).rows, load_.num_words).values
