"""Flags of `baton bench serve`, named as in `vllm bench serve`; field docstrings are the help text.

Read by `commands` and `workload`, saved in every run file. No environment variable sets them.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict, field_validator

from baton.settings.base import SettingsError

WordList = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())]


class ApiEndpoint(StrEnum):
    """The measured call of the OpenAI API."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Dataset(StrEnum):
    """Source of lengths, prefixes and arrivals."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MOONCAKE = "mooncake"
    AZURE = "azure"


TRACES = frozenset({Dataset.MOONCAKE, Dataset.AZURE})


class ServeOptions(BaseModel):
    """One run's flags."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    base_url: str = "http://127.0.0.1:8000"
    """The server, without /v1."""

    model: str | None = None
    """Name of the model; default: the first that the server lists."""

    endpoint: ApiEndpoint = ApiEndpoint.COMPLETIONS
    """completions (prompts as token ids) or chat (prompts as words)."""

    api_key: str | None = None
    """Sent as a bearer token; never saved."""

    dataset_name: Dataset = Dataset.RANDOM
    """random, shared-prefix, mooncake or azure."""

    dataset_path: str | None = None
    """The trace file of mooncake (JSONL) and azure (CSV)."""

    num_prompts: int = 100
    """Requests to send."""

    random_input_len: int = 1024
    """Prompt tokens of a request; of shared-prefix, those after the prefix."""

    random_output_len: int = 128
    """Tokens to ask for."""

    random_prefix_len: int = 512
    """Tokens of a shared prefix."""

    num_prefixes: int = 4
    """Shared prefixes that requests take in turn."""

    scale_length: float = 1.0
    """Multiplies a trace's lengths and prefix blocks, e.g. 0.0625."""

    scale_rate: float = 1.0
    """Speed factor of a trace's replay."""

    request_rate: float | None = None
    """Requests a second; default (inf): all at once, or a trace's own arrivals."""

    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is Poisson, less is burstier."""

    max_concurrency: int | None = None
    """Most concurrent requests; further ones wait."""

    vocab_size: int = 2048
    """Prompts are drawn from the token ids below this."""

    temperature: float = 0.0
    """Sampling temperature."""

    ignore_eos: Annotated[bool, Parameter(negative=())] = False
    """Ask for exactly the output length."""

    continuous_usage: bool = True
    """Request a token count in every event, to count bundled tokens."""

    seed: int = 0
    """Seed of prompts and arrivals."""

    num_warmups: int = 1
    """Requests sent before the run and not counted."""

    request_timeout_s: float = 600.0
    """A request that takes longer has failed."""

    goodput: WordList = ()
    """Objectives in ms; a good request meets all, e.g. ttft:500 tpot:50 e2el:9000."""

    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Metrics in the table."""

    metric_percentiles: str = "50,90,99"
    """Percentiles in the table."""

    save_result: Annotated[bool, Parameter(negative=())] = False
    """Save the run, with a row for every request."""

    result_dir: str = "."
    """The directory of the saved run."""

    result_filename: str | None = None
    """Its name; default: from dataset, rate and time."""

    @field_validator("request_rate")
    @classmethod
    def _finite(cls, rate: float | None) -> float | None:
        return None if rate is not None and math.isinf(rate) else rate

    @property
    def is_scheduled(self) -> bool:
        """True if requests have arrival times, which a slow client can miss."""
        return self.request_rate is not None or self.dataset_name in TRACES

    def check(self) -> None:
        """Raises `SettingsError` for the first flag that cannot work."""
        for flag, value in self._positive():
            if value is not None and not value > 0:
                raise SettingsError(f"--{flag} {value}", why="it must be over 0", hint="Raise it.")
        if self.num_warmups < 0:
            raise SettingsError(f"--num-warmups {self.num_warmups}", why="it is negative", hint="Give 0 or more.")
        if self.dataset_name in TRACES and self.dataset_path is None:
            why = "a trace is read from a file"
            raise SettingsError(f"--dataset-name {self.dataset_name}", why=why, hint="Give --dataset-path.")
        if not self.base_url.startswith(("http://", "https://")):
            why = "it must begin with http:// or https://"
            raise SettingsError(f"--base-url {self.base_url}", why=why, hint="Correct it.")

    def _positive(self) -> tuple[tuple[str, float | None], ...]:
        return (
            ("num-prompts", self.num_prompts),
            ("random-input-len", self.random_input_len),
            ("random-output-len", self.random_output_len),
            ("random-prefix-len", self.random_prefix_len),
            ("num-prefixes", self.num_prefixes),
            ("scale-length", self.scale_length),
            ("scale-rate", self.scale_rate),
            ("request-rate", self.request_rate),
            ("burstiness", self.burstiness),
            ("max-concurrency", self.max_concurrency),
            ("request-timeout-s", self.request_timeout_s),
        )
