"""Structured logs on standard error, one line an event: `get_logger(__name__).info("sealed", request_id=...)`.

`baton.services.cli` calls `configure_logging` once a process. Lines of other libraries get the same format.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_QUIET_LIBRARIES = ("asyncio", "filelock", "grpc", "httpcore2", "httpx2", "huggingface_hub", "urllib3")


def configure_logging(service: str, level: str = "info", fmt: str = "console") -> None:
    """Sends log lines from `level` up to standard error, each with the field `service`.

    `fmt` is `console` or `json`. The last call wins.
    """
    shared = _shared_processors(service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(fmt)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for library in _QUIET_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def get_logger(name: str = "baton") -> structlog.stdlib.BoundLogger:
    """A logger. `bind(request_id=...)` returns one that adds its fields to every line."""
    return structlog.stdlib.get_logger(name)


def shows(level: int) -> bool:
    """False if a line of `logging`'s level would be dropped. To make one and drop it takes 7 us, and its fields more:
    too much several times a request."""
    first = structlog.get_config()["processors"][:1]
    return first != [structlog.stdlib.filter_by_level] or logging.getLogger().isEnabledFor(level)


def shows_debug() -> bool:
    """False if a debug line would be dropped."""
    return shows(logging.DEBUG)


def _shared_processors(service: str) -> list[Processor]:
    def add_service(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _renderers(fmt: str) -> list[Processor]:
    if fmt == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    colours = sys.stderr.isatty()
    return [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)]
