"""The settings that several services share, as two small base classes, so that names stay flat.

Called by `services/*/settings.py`. Knows no single service.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from baton.settings.base import Settings, SettingsError

MIB = 1024 * 1024

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0, le=86400.0)]

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]", ""})


def _is_redis(url: str) -> str:
    if not url.startswith(_REDIS_SCHEMES):
        raise ValueError(f"a Redis URL begins with one of {', '.join(_REDIS_SCHEMES)}")
    return url


def _is_store_url(url: str) -> str:
    return url if url == "memory://" else _is_redis(url)


RedisUrl = Annotated[str, AfterValidator(_is_redis)]
StoreUrl = Annotated[str, AfterValidator(_is_store_url)]


class LogFormat(StrEnum):
    """How a log line looks."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Dtype(StrEnum):
    """Number format of weights and KV; AUTO takes bfloat16 on GPUs and where the CPU computes it well, else float32."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DecoderKind(StrEnum):
    """Who computes the model; AUTO takes the lean decoder where it serves the model and proves itself at start."""

    AUTO = "auto"
    LEAN = "lean"
    STOCK = "stock"


class QuantizationKind(StrEnum):
    """Number format of the weight matrices where it is not `dtype`."""

    NONE = "none"
    INT8 = "int8"


class Device(StrEnum):
    """Where the model runs; AUTO takes a GPU when there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Transport(StrEnum):
    """How page bytes move; AUTO takes NIXL where it works, else the gRPC stream."""

    AUTO = "auto"
    NIXL = "nixl"
    STREAM = "stream"


class ClusterTrustSettings(Settings):
    """How a process shows that it belongs to the cluster."""

    cluster_secret_file: Path | None = None
    """File with the secret that router and workers share, 32 bytes or more; without it a worker serves any caller."""

    tls_cert_file: Path | None = None
    """This process's certificate (PEM) for calls between router and workers; goes with tls_key_file and tls_ca_file."""

    tls_key_file: Path | None = None
    """The certificate's private key (PEM, without a password)."""

    tls_ca_file: Path | None = None
    """Authorities (PEM) that the certificates of peers must come from; a peer without one gets no connection."""


class ServiceSettings(ClusterTrustSettings):
    """What every service has."""

    host: str = "127.0.0.1"
    """Interface to listen on."""

    model: str = "bundled"
    """`bundled`, a directory with a Hugging Face model, or a Hugging Face id such as `Qwen/Qwen3-0.6B`."""

    redis_url: StoreUrl = "redis://127.0.0.1:6379/0"
    """Where the state store is: redis://, rediss:// or unix:// (memory:// serves one process alone)."""

    heartbeat_interval_s: Seconds = 0.5
    """How often a worker announces itself, and the longest that a router goes without looking."""

    worker_ttl_s: Seconds = 2.0
    """How long an announcement is believed."""

    drain_timeout_s: Seconds = 30.0
    """How long running requests may take to finish after SIGTERM."""

    cpu_affinity: str | None = None
    """Cores this process may use, e.g. `0-3,8`; default: all."""

    log_level: LogLevel = LogLevel.INFO
    """The least severe log line that is written."""

    log_format: LogFormat = LogFormat.CONSOLE
    """`console` for people, `json` for machines; both on standard error."""

    @field_validator("cpu_affinity")
    @classmethod
    def _readable(cls, cores: str | None) -> str | None:
        if cores is not None:
            parse_cores(cores)
        return cores

    @model_validator(mode="after")
    def _ttl_outlives_heartbeat(self) -> Self:
        if self.worker_ttl_s < 2 * self.heartbeat_interval_s:
            raise ValueError("worker_ttl_s must be at least twice heartbeat_interval_s, or live workers would vanish")
        return self

    @property
    def cores(self) -> frozenset[int] | None:
        """`cpu_affinity` as core numbers; None for all."""
        return None if self.cpu_affinity is None else parse_cores(self.cpu_affinity)


DEFAULT_IDLE_CHECK_PAGES = 512


class WorkerSettings(ServiceSettings):
    """What prefill and decode share. Each adds `worker_id`, `port` and `metrics_port` defaults of its own."""

    worker_id: str
    """Stable name of this worker; survives a restart."""

    port: Port
    """gRPC port; 0 takes a free one."""

    metrics_port: Port
    """Port of Prometheus' /metrics; 0 takes a free one."""

    advertise_address: str | None = None
    """host:port under which other machines reach this worker; default: host and the bound port."""

    dtype: Dtype = Dtype.AUTO
    """Number format of weights and KV: auto, float32 or bfloat16."""

    device: Device = Device.AUTO
    """Where the model runs: auto (a GPU where there is one), cpu or cuda."""

    page_size: Count = 16
    """Token slots of a page; equal on all workers."""

    num_pages: Count | None = None
    """Pages of the pool; default: as many as fit in kv_memory_mib."""

    kv_memory_mib: Count = 512
    """Memory for the pool, in MiB, unless num_pages is given."""

    max_model_len: Count | None = None
    """Most tokens of prompt and output together; default: what the model was made for."""

    export_lease_s: Seconds = 5.0
    """How long prefill keeps a handoff's pages without hearing from decode; equal on all workers."""

    idle_check_pages: Annotated[int, Field(ge=0)] = DEFAULT_IDLE_CHECK_PAGES
    """Pages whose bookkeeping an idle turn checks before it looks for requests again; 0: the whole pool."""

    transport: Transport = Transport.AUTO
    """How pages move: auto, nixl or stream."""

    digests: bool = True
    """Check every page's digest as it lands."""

    threads: Count = 1
    """Compute threads; give every worker cores of its own."""

    decoder: DecoderKind = DecoderKind.AUTO
    """Who computes the model: auto, lean (or do not start) or stock, the modelling code of transformers."""

    pack_linears: bool = True
    """Lay weight matrices out for speed on CPU; one at a time is kept twice while starting."""

    kernels: bool = True
    """Compute with the native kernels, where they were built and prove themselves; else torch does everything."""

    quantization: QuantizationKind = QuantizationKind.NONE
    """Weight matrices as they are (none) or rounded to int8; equal on all workers."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.host in _ANY_ADDRESS and self.advertise_address is None:
            raise ValueError(f"host {self.host!r} is not an address that others can call: set advertise_address")
        return self

    @model_validator(mode="after")
    def _quantizable(self) -> Self:
        if self.quantization is QuantizationKind.INT8 and (self.decoder is DecoderKind.STOCK or not self.kernels):
            raise ValueError("quantization int8 needs the lean decoder and the native kernels: leave both switched on")
        return self

    @property
    def max_idle_check_pages(self) -> int | None:
        """The bound of `baton.kv.integrity_check`; None: no bound."""
        return self.idle_check_pages or None

    def advertised(self, bound_port: int) -> str:
        """The host:port to announce once the gRPC server is bound."""
        return self.advertise_address or f"{self.host}:{bound_port}"

    def pool_pages(self, page_bytes: int) -> int:
        """Pages of the pool for pages of `page_bytes`. Raises `SettingsError` when the memory holds none."""
        if self.num_pages is not None:
            return self.num_pages
        num_pages = self.kv_memory_mib * MIB // page_bytes
        if num_pages < 1:
            why = f"one page takes {page_bytes / MIB:.1f} MiB"
            raise SettingsError(f"kv_memory_mib={self.kv_memory_mib}", why=why, hint="Raise --kv-memory-mib.")
        return num_pages


def parse_cores(text: str) -> frozenset[int]:
    """The cores named by `0-3,8`, both ends included. Raises `ValueError`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"cores are given like 0-3,8, not {text!r}")
        cores.update(range(int(first), int(last or first) + 1))
    if not cores:
        raise ValueError(f"{text!r} names no core")
    return frozenset(cores)
