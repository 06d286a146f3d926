"""`baton serve router|prefill|decode|encode`: one service in this process, with flags generated from its settings.

A service's own modules are imported last: `baton serve router` needs no torch, and torch must find its cores and
threads already set.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, cast

import uvloop
from cyclopts import App, Parameter

from baton.services.cli.settings import COMMANDS
from baton.services.cli.worker_packages import require_worker_packages
from baton.services.decode.settings import DecodeSettings
from baton.services.encode.settings import EncodeSettings
from baton.services.prefill.settings import PrefillSettings
from baton.services.router.settings import RouterSettings
from baton.settings.base import refuse_unknown_variables
from baton.settings.groups import ServiceSettings, WorkerProcessSettings
from baton.settings.process import limit_cores, limit_threads
from baton.telemetry.logs import configure_logging

FLAT = Parameter(name="*")

serve_app = App(name="serve", help="Run one service in this process.")


@serve_app.command
def router(*, settings: Annotated[RouterSettings | None, FLAT] = None) -> int:
    """Serve the OpenAI-compatible API and dispatch requests to workers."""
    return run_service("router", settings or RouterSettings())


@serve_app.command
def prefill(*, settings: Annotated[PrefillSettings | None, FLAT] = None) -> int:
    """Compute prompts and export their pages."""
    return run_service("prefill", settings or PrefillSettings())


@serve_app.command
def decode(*, settings: Annotated[DecodeSettings | None, FLAT] = None) -> int:
    """Import prompts' pages and generate tokens."""
    return run_service("decode", settings or DecodeSettings())


@serve_app.command
def encode(*, settings: Annotated[EncodeSettings | None, FLAT] = None) -> int:
    """Encode images for prefill workers."""
    return run_service("encode", settings or EncodeSettings())


def run_service(name: str, settings: ServiceSettings) -> int:
    """Prepares the process, then calls `services.<name>.app.serve(settings)`. Returns the exit code."""
    refuse_unknown_variables(COMMANDS.values())
    if isinstance(settings, WorkerProcessSettings):
        require_worker_packages(f"baton serve {name}")
    configure_logging(name, settings.log_level, settings.log_format)
    if settings.cores is not None:
        limit_cores(settings.cores)
    if isinstance(settings, WorkerProcessSettings):
        limit_threads(settings.threads)
    return uvloop.run(_service(name)(settings))


def _service(name: str) -> Callable[[ServiceSettings], Coroutine[Any, Any, int]]:
    module = importlib.import_module(f"baton.services.{name}.app")
    return cast("Callable[[ServiceSettings], Coroutine[Any, Any, int]]", module.serve)
