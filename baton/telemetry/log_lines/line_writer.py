"""Writes a log line with many fields past structlog and `logging`: the same text for a fraction of the CPU time.

`logs.configure_logging` makes one `LineWriter` a process. It writes only where that gives what the loggers would give:
while nobody has changed what `configure_logging` set up.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.typing import Processor

_EVENT_CHARS, _LEVEL_CHARS = 30, 9
"""Widths of `structlog.dev.ConsoleRenderer`'s columns."""

_OTHERS = frozenset(
    {"exc_info", "exception", "stack", "stack_info", "positional_args", "logger_name", "_record", "_from_structlog"}
)
"""Names that structlog does not show as a field like any other."""

_QUOTED = re.compile("[ \t=\r\n\"']")
"""Characters for which `ConsoleRenderer` shows a text's `repr`."""

_json_encoder = json.JSONEncoder(default=str)


class LineWriter:
    """Writes lines of level INFO of one logger to `handler`, the only one of the root logger."""

    def __init__(
        self,
        handler: logging.StreamHandler[TextIO],
        service: str,
        stamp: Processor,
        logger: logging.Logger,
        *,
        is_json: bool,
    ) -> None:
        """`stamp` adds the timestamp. Made when `logging` and structlog are configured, whose state it remembers."""
        self._handler = handler
        self._formatter = handler.formatter
        self._service = service
        self._stamp = stamp
        self._render = _json_encoder.encode if is_json else console_text
        self._logger = logger
        self._root = logging.getLogger()
        config = structlog.get_config()
        self._processors = list(config["processors"])
        self._wrapper_class, self._logger_factory = config["wrapper_class"], config["logger_factory"]

    def write(self, event: str, fields: Mapping[str, object]) -> bool:
        """Writes the line unless its level is hidden. False: nothing is done, and the logger has to do it."""
        if not self._is_unchanged():
            return False
        line: dict[str, object] = {**fields, "event": event}
        structlog.contextvars.merge_contextvars(None, "info", line)
        if not _OTHERS.isdisjoint(line):
            return False
        if not self._logger.isEnabledFor(logging.INFO):
            return True
        line.setdefault("service", self._service)
        line["level"], line["logger"] = "info", self._logger.name
        self._stamp(None, "info", line)
        handler = self._handler
        try:
            text = self._render(line) + handler.terminator
            handler.acquire()
            try:
                handler.stream.write(text)
                handler.flush()
            finally:
                handler.release()
        except RecursionError:
            raise
        except Exception:
            handler.handleError(logging.LogRecord(self._logger.name, logging.INFO, __file__, 0, event, (), None))
        return True

    def _is_unchanged(self) -> bool:
        handler, logger, root, config = self._handler, self._logger, self._root, structlog.get_config()
        return (
            root.handlers == [handler]
            and handler.formatter is self._formatter
            and handler.level <= logging.INFO
            and not handler.filters
            and not (logger.handlers or logger.filters)
            and logger.propagate
            and logger.parent is root
            and not logger.disabled
            and config["processors"] == self._processors
            and config["wrapper_class"] is self._wrapper_class
            and config["logger_factory"] is self._logger_factory
        )


def console_text(line: dict[str, object]) -> str:
    """What `ConsoleRenderer` without colours makes of an event. Takes timestamp, level, event and logger out of it."""
    parts = [
        str(line.pop("timestamp")),
        f"[{line.pop('level'):<{_LEVEL_CHARS}}]",
        f"{line.pop('event'):<{_EVENT_CHARS}}",
        f"[{line.pop('logger')}]",
    ]
    for name in sorted(line):
        value = line[name]
        shown = value if isinstance(value, str) and not _QUOTED.search(value) else repr(value)
        parts.append(name + "=" + shown)
    return " ".join(parts).rstrip(" ")
