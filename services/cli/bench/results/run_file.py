"""A run as a file: one JSON with the flags and a row for every request. Written and read by `commands`.

It holds no figures: the table is always computed from the rows.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.domain.errors import BatonError
from baton.services.cli.bench.options import ServeOptions
from baton.services.cli.bench.results.records import RequestRow

FORMAT = 1


class RunFileError(BatonError):
    """A file without a valid run."""

    code = "bad_run_file"


class RunFile(BaseModel):
    """`started`: UTC. `model`: the requested name."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    format: int = FORMAT
    baton_version: str
    started: datetime.datetime
    model: str
    options: ServeOptions
    rows: tuple[RequestRow, ...]


def file_name(run: RunFile) -> str:
    """File name from dataset, rate and start."""
    options = run.options
    rate = "own" if options.request_rate is None else f"{options.request_rate:g}"
    return f"baton-{options.dataset_name}-{rate}qps-{run.started:%Y%m%dT%H%M%S}.json"


def save(run: RunFile, directory: Path) -> Path:
    """Writes the run without the API key and returns the path. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (run.options.result_filename or file_name(run))
    secretless = run.model_copy(update={"options": run.options.model_copy(update={"api_key": None})})
    path.write_text(secretless.model_dump_json(), encoding="utf-8")
    return path


def load(path: Path) -> RunFile:
    """Reads a run. Raises `RunFileError`, `OSError`."""
    try:
        run = RunFile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise RunFileError(f"{path} is not a run of `baton bench serve`: {where}: {first['msg']}") from None
    if run.format != FORMAT:
        raise RunFileError(f"{path} has format {run.format}; this version reads {FORMAT}")
    return run
