"""Structured logs on standard error, one line an event: `get_logger(__name__).info("sealed", request_id=...)`.

`baton.services.cli` calls `configure_logging` once a process. Lines of other libraries get the same format.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from baton.telemetry.log_lines.line_writer import LineWriter

_QUIET_LIBRARIES = ("asyncio", "filelock", "grpc", "httpcore2", "httpx2", "huggingface_hub", "urllib3")
_NAME = "baton"
_ROOT = logging.getLogger()
_FILTER = structlog.stdlib.filter_by_level


def configure_logging(service: str, level: str = "info", fmt: str = "console") -> None:
    """Sends log lines from `level` up to standard error, each with the field `service`.

    `fmt` is `console` or `json`. The last call wins.
    """
    global _line_writer
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    shared = _shared_processors(service, stamp)
    has_colours = fmt != "json" and sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(fmt, has_colours)],
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
    logger, is_json = logging.getLogger(_NAME), fmt == "json"
    _line_writer = None if has_colours else LineWriter(handler, service, stamp, logger, is_json=is_json)


def get_logger(name: str = _NAME) -> structlog.stdlib.BoundLogger:
    """A logger. `bind(request_id=...)` returns one that adds its fields to every line."""
    return structlog.stdlib.get_logger(name)


def log_info(event: str, fields: Mapping[str, object]) -> None:
    """`get_logger().info(event, **fields)` for a line with many fields that comes often: the same line, cheaper."""
    if _line_writer is None or not _line_writer.write(event, fields):
        _log.info(event, **fields)


def shows(level: int) -> bool:
    """False if a line of `logging`'s level would be dropped. To make one and drop it takes 7 us, and its fields more:
    too much several times a request."""
    processors = structlog.get_config()["processors"]
    return not processors or processors[0] is not _FILTER or _ROOT.isEnabledFor(level)


def shows_debug() -> bool:
    """False if a debug line would be dropped."""
    return shows(logging.DEBUG)


_log = get_logger()
_line_writer: LineWriter | None = None  # of the last `configure_logging`


def _shared_processors(service: str, stamp: Processor) -> list[Processor]:
    def add_service(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        stamp,
        structlog.processors.StackInfoRenderer(),
    ]


def _renderers(fmt: str, has_colours: bool) -> list[Processor]:
    if fmt == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=has_colours, exception_formatter=structlog.dev.plain_traceback)]
