"""Closed sets of values of settings that workers share. `groups` has the settings."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """Number format of weights and KV. AUTO: bfloat16 on GPUs and on CPUs with fast bfloat16, else float32."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DecoderKind(StrEnum):
    """Implementation of the model. AUTO: the lean decoder if it supports the model and passes the start-up check."""

    AUTO = "auto"
    LEAN = "lean"
    STOCK = "stock"


class QuantizationKind(StrEnum):
    """Number format of the weight matrices; NONE: `dtype`."""

    NONE = "none"
    INT8 = "int8"


class KVDtypeKind(StrEnum):
    """Number format of K and V in pages. AUTO: the model's."""

    AUTO = "auto"
    INT8 = "int8"


class Device(StrEnum):
    """Device of the model. AUTO: a GPU if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Transport(StrEnum):
    """Transport of page bytes. AUTO: NIXL if it works, else the stream."""

    AUTO = "auto"
    NIXL = "nixl"
    STREAM = "stream"


class VisionKind(StrEnum):
    """Serving of images. AUTO: where the model's type is served with images and the checkpoint has what it needs.

    LOCAL: prefill workers encode all. REMOTE: they keep no vision tower; encode workers have it.
    """

    AUTO = "auto"
    LOCAL = "local"
    REMOTE = "remote"
    OFF = "off"


class PageCheckKind(StrEnum):
    """Checks of matched pages. AUTO: all of a pool in host memory; a sample of a GPU's, whose pages are copied."""

    AUTO = "auto"
    ALL = "all"
    SAMPLED = "sampled"
    OFF = "off"


class EvictionPolicyKind(StrEnum):
    """Order in which cached pages are evicted."""

    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    PRIORITY = "priority"


class MetricNamesKind(StrEnum):
    """Further names of metrics."""

    NONE = "none"
    VLLM = "vllm"


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
