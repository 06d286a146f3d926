"""Closed sets of values of settings that workers share. `groups` has the settings."""

from __future__ import annotations

from enum import StrEnum


class PageSharingKind(StrEnum):
    """Cached pages that workers read from each other: none; those that are read sooner than computed (CHEAPER); all."""

    OFF = "off"
    CHEAPER = "cheaper"
    ALWAYS = "always"


class KvEventsFormat(StrEnum):
    """How a batch of KV events and its events are laid out.

    ARRAYS: both as arrays (SGLang, and vLLM before it named the fields). TAGGED: events as maps with a `type`. MAPS:
    the batch as a map too (vLLM of late).
    """

    ARRAYS = "arrays"
    TAGGED = "tagged"
    MAPS = "maps"


class WeightSharingKind(StrEnum):
    """Use of files with ready weights. AUTO: where the file is on huge pages, or private memory would not be either."""

    AUTO = "auto"
    ALWAYS = "always"
    OFF = "off"


class PageTagKind(StrEnum):
    """Tags of pages. AUTO: with a cluster secret, for pools in host memory whose bytes travel in clear."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogFormat(StrEnum):
    """Format of log lines."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """Least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
