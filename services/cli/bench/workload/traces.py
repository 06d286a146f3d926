"""Public request traces: Mooncake's JSONL and Azure's CSV, read and scaled. Used by `plan`.

Mooncake: https://github.com/kvcache-ai/Mooncake (`timestamp` ms, `hash_ids`: one id a 512-token prefix block, equal
ids are equal tokens). Azure: https://github.com/Azure/AzurePublicDataset (TIMESTAMP, ContextTokens, GeneratedTokens).
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from baton.domain.errors import BatonError

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(BatonError):
    """A trace file that cannot be replayed."""

    code = "bad_trace"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace, `arrival_s` after the first. `block_ids` is empty where a trace has no prefixes."""

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path) -> list[TraceRow]:
    """All requests. Raises `TraceError`, `OSError`."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open("rb") as file:
        try:
            lines = [decoder.decode(line) for line in file]
        except msgspec.DecodeError as error:
            raise TraceError(f"{path} is not a Mooncake trace: {error}") from None
    rows = (TraceRow(x.timestamp / 1000.0, x.input_length, x.output_length, x.hash_ids) for x in lines)
    return _from_zero(rows, path)


def read_azure(path: Path) -> list[TraceRow]:
    """All requests. Raises `TraceError`, `OSError`."""
    with path.open(newline="", encoding="utf-8") as file:
        try:
            rows = list(_azure_rows(csv.DictReader(file)))
        except (KeyError, ValueError) as error:
            raise TraceError(f"{path} is not an Azure trace: {error}") from None
    return _from_zero(rows, path)


def scale(rows: Sequence[TraceRow], *, length: float, rate: float) -> list[TraceRow]:
    """Lengths multiplied by `length` (never below one token), arrivals `rate` times as fast."""
    return [
        replace(
            row,
            arrival_s=row.arrival_s / rate,
            num_input_tokens=max(1, round(row.num_input_tokens * length)),
            num_output_tokens=max(1, round(row.num_output_tokens * length)),
        )
        for row in rows
    ]


def scaled_block_tokens(length: float) -> int:
    """The size of a Mooncake block when lengths are scaled: it shrinks with them, so prefixes stay shared."""
    return max(1, round(MOONCAKE_BLOCK_TOKENS * length))


def _azure_rows(lines: Iterable[dict[str, str]]) -> Iterator[TraceRow]:
    for line in lines:
        # Seven digits of a second's fraction; `fromisoformat` of Python 3.11 reads any number and keeps six.
        stamp = datetime.datetime.fromisoformat(line["TIMESTAMP"]).replace(tzinfo=datetime.UTC)
        yield TraceRow(stamp.timestamp(), int(line["ContextTokens"]), int(line["GeneratedTokens"]))


def _from_zero(rows: Iterable[TraceRow], path: Path) -> list[TraceRow]:
    """In order of arrival, the first at 0. Raises `TraceError` for a trace without requests."""
    ordered = sorted(rows, key=lambda row: row.arrival_s)
    if not ordered:
        raise TraceError(f"{path} has no requests")
    first_s = ordered[0].arrival_s
    return [replace(row, arrival_s=row.arrival_s - first_s) for row in ordered]
