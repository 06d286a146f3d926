"""Settings that several services share, as small base classes with flat names. Used by `services/*/settings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from baton.settings.base import Settings, SettingsError
from baton.settings.choices import (
    DecoderKind,
    Device,
    Dtype,
    EvictionPolicyKind,
    KVDtypeKind,
    KvEventsFormat,
    MetricNamesKind,
    PageCheckKind,
    PageSharingKind,
    PageTagKind,
    QuantizationKind,
    Transport,
    VisionKind,
    WeightSharingKind,
)
from baton.settings.choices import LogFormat as LogFormat
from baton.settings.choices import LogLevel as LogLevel

MIB = 1024 * 1024

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0, le=86400.0)]

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]", ""})


def _is_redis(url: str) -> str:
    if not url.startswith(_REDIS_SCHEMES):
        raise ValueError(f"a Redis URL begins with one of {', '.join(_REDIS_SCHEMES)}")
    return url


def _is_store_url(url: str) -> str:
    return url if url == "memory://" else _is_redis(url)


RedisUrl = Annotated[str, AfterValidator(_is_redis)]
StoreUrl = Annotated[str, AfterValidator(_is_store_url)]


class ClusterTrustSettings(Settings):
    """Credentials of a process of the cluster."""

    cluster_secret_file: Path | None = None
    """File with the secret that router and workers share, at least 32 bytes; without it a worker serves any caller. A
    second line is a second valid secret, for the rotation of secrets."""

    tls_cert_file: Path | None = None
    """Certificate (PEM) of this process for calls between router and workers; needs tls_key_file and tls_ca_file."""

    tls_key_file: Path | None = None
    """The certificate's private key (PEM, without a password)."""

    tls_ca_file: Path | None = None
    """Authorities (PEM) of the peers' certificates; a peer without such a certificate gets no connection."""


class ServiceSettings(ClusterTrustSettings):
    """Settings of every service."""

    host: str = "127.0.0.1"
    """Interface to listen on."""

    model: str = "bundled"
    """`bundled`, `bundled-vision`, a directory with a Hugging Face model, or an id of its Hub: `Qwen/Qwen3-0.6B`."""

    chat_template: Path | None = None
    """File with a Jinja template in place of the model's own chat template; the same on all routers and workers."""

    redis_url: StoreUrl = "redis://127.0.0.1:6379/0"
    """URL of the state store: redis://, rediss:// or unix:// (memory:// serves a single process)."""

    heartbeat_interval_s: Seconds = 0.5
    """Interval of worker announcements, and longest interval between two reads of the registry."""

    worker_ttl_s: Seconds = 2.0
    """Lifetime of a worker's announcement."""

    drain_timeout_s: Seconds = 30.0
    """Time for running requests to finish after SIGTERM."""

    cpu_affinity: str | None = None
    """Cores of this process, e.g. `0-3,8`; default: all."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe log level that is written."""

    log_format: LogFormat = LogFormat.CONSOLE
    """`console` for people, `json` for machines; both on standard error."""

    @field_validator("chat_template")
    @classmethod
    def _is_file(cls, template: Path | None) -> Path | None:
        if template is not None and not template.is_file():
            raise ValueError("there is no such file; give a Jinja template, such as ./chat_template.jinja")
        return template

    metrics_compat: MetricNamesKind = MetricNamesKind.NONE
    """Show a dozen metrics under vLLM's names, too: none or vllm. For dashboards, autoscalers and endpoint pickers."""

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
    def vllm_names(self) -> bool:
        """True if metrics are shown under vLLM's names, too."""
        return self.metrics_compat is MetricNamesKind.VLLM

    @property
    def cores(self) -> frozenset[int] | None:
        """`cpu_affinity` as core numbers; None for all."""
        return None if self.cpu_affinity is None else parse_cores(self.cpu_affinity)


DEFAULT_IDLE_CHECK_PAGES = 512
RENEWALS_PER_LEASE = 10
"""Renewals within one lease, so that a few may be lost."""
MAX_RENEW_INTERVAL_S = 0.5
GIVEN_SHARE = 0.1
"""Of the pool: most pages that are pinned for other workers' caches only."""


LOOPBACK_TCP = ("tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


class WorkerProcessSettings(ServiceSettings):
    """Settings of every worker. Each role sets its own defaults of `port` and `metrics_port`."""

    worker_id: Annotated[str, Field(min_length=1)] | None = None
    """Stable name of this worker, which survives a restart; default: role, host (in Docker: container), and the port if
    unusual."""

    port: Port
    """gRPC port; 0 takes a free one."""

    metrics_port: Port
    """Port of Prometheus' /metrics; 0 takes a free one."""

    advertise_address: str | None = None
    """host:port of this worker for other machines; default: host and the bound port. For a host that means every
    interface, the default is the one that leads to Redis."""

    dtype: Dtype = Dtype.AUTO
    """Number format of weights and KV: auto, float32 or bfloat16."""

    device: Device = Device.AUTO
    """Device of the model: auto (a GPU if there is one), cpu or cuda."""

    threads: Count = 1
    """Compute threads. Give each worker its own cores."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        has_route = self.redis_url.startswith(("redis://", "rediss://"))
        if self.host in ANY_ADDRESS and self.advertise_address is None and not has_route:
            raise ValueError(f"host {self.host!r} is not an address that others can call: set advertise_address")
        return self

    def advertised(self, bound_port: int) -> str:
        """The host:port to announce once the gRPC server is bound, unless `host` means every interface."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return self.advertise_address or f"{host}:{bound_port}"


class WorkerSettings(WorkerProcessSettings):
    """Settings of workers with a page pool: prefill and decode."""

    draft_model: str | None = None
    """A smaller model with the same tokens, an EAGLE-1 or EAGLE-3 head of the model, or the model itself, if it has
    MTP layers, named as `model` is. Its KV lies in the pages beside the model's. Decode drafts with it, if `--drafter`
    is draft-model, eagle or mtp; the same on all workers. `bundled-head`: the head of the bundled model.
    Default: none."""

    kv_dtype: KVDtypeKind = KVDtypeKind.AUTO
    """Number format of K and V in pages: the model's (auto) or int8, which needs 27 % (of float32) or 53 % (of
    bfloat16) of the memory with heads of 64, and changes outputs a little; the same on all workers."""

    page_size: Count = 16
    """Token slots of a page; the same on all workers."""

    kv_head_groups: Count = 1
    """Parts that a page is cut into by KV heads; it divides the KV heads of every layer; the same on all workers."""

    latent_pages: bool = True
    """Pages of a model with multi-head latent attention keep the latent, not every head's K and V; the same on all
    workers."""

    num_pages: Count | None = None
    """Pages of the pool; default: as many as fit in kv_memory_mib."""

    kv_memory_mib: Count = 512
    """Memory for the pool, in MiB, unless num_pages is given."""

    window_slots: str = "auto"
    """KV of layers with a sliding window, where other layers have none, in slots of its own, for the tokens that are
    still read: auto, a share of the pages that has a slot (such as 0.25), or off. Other models, int8 pages, several
    head groups and GPUs have no slots."""

    max_model_len: Count | None = None
    """Most tokens of prompt and output together; default: the model's own limit."""

    export_lease_s: Seconds = 5.0
    """Lease of an exported prompt's pages, which decode renews; the same on all workers."""

    idle_check_pages: Annotated[int, Field(ge=0)] = DEFAULT_IDLE_CHECK_PAGES
    """Pages whose bookkeeping an idle turn checks before it looks for requests again; 0: the whole pool."""

    transport: Transport = Transport.AUTO
    """Transport of pages: auto, nixl or stream."""

    page_port: Port = 0
    """Port at which peers read pages where NIXL is not used; 0 takes a free one. Peers that cannot reach it, and all
    peers where certificates are set, read through the gRPC port, more slowly."""

    advertise_page_address: str | None = None
    """host:port of page_port for other machines; default: the host of the gRPC address, and the bound port."""

    session_port: Port = 0
    """Port at which routers, and workers that read pages here, open their sessions; 0 takes a free one. Those that
    cannot reach it, and all where certificates are set, open them through the gRPC port, at a higher cost a message."""

    advertise_session_address: str | None = None
    """host:port of session_port for other machines; default: the host of the gRPC address, and the bound port."""

    digests: bool = True
    """Check the digest of every imported page."""

    page_checks: PageCheckKind = PageCheckKind.AUTO
    """Check cached pages again when a prompt matches them: all, sampled (one in 16), off, or auto; needs digests.
    Unless off, idle pages are checked too, within 10 minutes."""

    eviction_policy: EvictionPolicyKind = EvictionPolicyKind.LRU
    """Order in which cached pages are evicted: least recently used (lru), least often matched (lfu), segmented LRU
    (slru), which evicts pages that no second request has matched first, or those of requests of the lowest `priority`
    first (priority), over all tenants."""

    page_tags: PageTagKind = PageTagKind.AUTO
    """Authenticate imported pages with tags under the cluster secret: on, off, or auto, which is on where a pool in
    host memory travels in clear (NIXL, or stream without TLS); needs a secret and digests; the same on all workers."""

    page_sharing: PageSharingKind = PageSharingKind.CHEAPER
    """Give cached pages to other workers, and (prefill) read theirs where they have more of a prompt: off, cheaper (if
    reading should take less time than computing) or always; needs digests."""

    priority_scheduling: bool = False
    """Serve requests of higher `priority` first, over all tenants; set a tenant's `max_priority` to bound it. Prefill:
    before `prefill_policy` counts. Decode: rows of low priority give way when pages run out. Low ones do not starve."""

    vision: VisionKind = VisionKind.AUTO
    """Serve images: auto (if the model can be served with them; prefill workers encode, or take embeddings of encode
    workers), local (required; prefill workers encode all), remote (required; prefill workers keep no vision tower and
    need encode workers) or off. Decode workers take what prefill made. All workers off, or none."""

    core_lease_file: Path | None = None
    """File in which workers of this host lend each other the cores of `--cpu-affinity` while they are idle. `baton up`
    makes it; needs the native kernels."""

    decoder: DecoderKind = DecoderKind.AUTO
    """Implementation of the model: auto, lean (required) or stock (the modelling code of transformers)."""

    pack_linears: bool = True
    """Pack weight matrices for speed on CPU; one matrix at a time is held twice while starting."""

    kernels: bool = True
    """Use the native kernels if they were built and pass the start-up check; otherwise torch computes everything."""

    quantization: QuantizationKind = QuantizationKind.NONE
    """Weight matrices unchanged (none) or rounded to int8; the same on all workers."""

    weight_sharing: WeightSharingKind = WeightSharingKind.AUTO
    """Keep the weights of the workers of a host once, in a file that all of them map: auto (unless private memory would
    have larger pages), always or off. For models that the lean decoder runs on a CPU."""

    weight_cache_dir: Path | None = None
    """Directory of files with ready weights; default: `.baton` beside the model's files, or `~/.cache/baton/weights`
    where that cannot be written, and for the bundled model. Nobody else may write to it."""

    kv_events_endpoint: str | None = None
    """ZeroMQ address, e.g. tcp://127.0.0.1:5557, at which the events of the prefix cache are published for routers of
    other projects, as vLLM and SGLang do; needs the extra `zmq`. Default: none. Baton's routers do not need it."""

    kv_events_replay_endpoint: str | None = None
    """ZeroMQ address at which subscribers ask for batches that they missed; default: none."""

    kv_events_format: KvEventsFormat = KvEventsFormat.ARRAYS
    """Layout of events: arrays (SGLang, earlier vLLM), tagged (events as maps) or maps (batches as well)."""

    kv_events_public: bool = False
    """Allow addresses that other machines reach: there is no authentication, and events hold the tokens of prompts."""

    @model_validator(mode="after")
    def _kv_events_stay_here(self) -> Self:
        if self.kv_events_endpoint is None and self.kv_events_replay_endpoint is not None:
            raise ValueError("kv_events_replay_endpoint needs kv_events_endpoint")
        for endpoint in (self.kv_events_endpoint, self.kv_events_replay_endpoint):
            is_here = endpoint is None or endpoint.startswith(("ipc://", *LOOPBACK_TCP))
            if not is_here and not self.kv_events_public:
                raise ValueError(
                    f"kv events at {endpoint} could be read by other machines, with the tokens of prompts: bind "
                    "tcp://127.0.0.1:PORT or ipc://PATH, or set kv_events_public"
                )
        return self

    @model_validator(mode="after")
    def _quantizable(self) -> Self:
        if self.quantization is QuantizationKind.INT8 and (self.decoder is DecoderKind.STOCK or not self.kernels):
            raise ValueError("quantization int8 needs the lean decoder and the native kernels: leave both switched on")
        if self.kv_dtype is KVDtypeKind.INT8 and self.draft_model is not None:
            raise ValueError("kv_dtype int8 and draft_model exclude each other: draft layers have no scales")
        return self

    @field_validator("window_slots")
    @classmethod
    def _is_a_share(cls, text: str) -> str:
        _share_of(text, 1.0)
        return text

    def window_share(self, auto: float) -> float | None:
        """Window slots a page; None: no slots. `auto`: for that choice."""
        return _share_of(self.window_slots, auto)

    @property
    def max_idle_check_pages(self) -> int | None:
        """The bound of `baton.kv.integrity_check`; None: no bound."""
        return self.idle_check_pages or None

    @property
    def shares_pages(self) -> bool:
        """True if other workers may read cached pages of this one, and a prefill worker theirs."""
        return self.digests and self.page_sharing is not PageSharingKind.OFF

    def max_given_pages(self, num_pages: int) -> int:
        """Most pages of a pool that are pinned for other workers' caches only."""
        return max(1, int(GIVEN_SHARE * num_pages))

    @property
    def renew_interval_s(self) -> float:
        """Interval of lease renewals, which also bring the keys that a source has quarantined."""
        return min(MAX_RENEW_INTERVAL_S, self.export_lease_s / RENEWALS_PER_LEASE)

    def pool_pages(self, page_bytes: int) -> int:
        """Number of pages of `page_bytes` in the pool. Raises `SettingsError` if not one fits."""
        if self.num_pages is not None:
            return self.num_pages
        num_pages = self.kv_memory_mib * MIB // page_bytes
        if num_pages < 1:
            why = f"one page takes {page_bytes / MIB:.1f} MiB"
            raise SettingsError(f"kv_memory_mib={self.kv_memory_mib}", why=why, hint="Raise --kv-memory-mib.")
        return num_pages


def _share_of(text: str, auto: float) -> float | None:
    """The share that `window_slots` names. Raises `ValueError` for anything else than off, auto or a share."""
    if text == "off":
        return None
    if text == "auto":
        return auto
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ValueError(f"window_slots is off, auto, or a share of the pages such as 0.25, not {text!r}")
    return share


def parse_cores(text: str) -> frozenset[int]:
    """Core numbers of a list such as `0-3,8`, both ends included. Raises `ValueError`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"cores are given like 0-3,8, not {text!r}")
        cores.update(range(int(first), int(last or first) + 1))
    if not cores:
        raise ValueError(f"{text!r} names no core")
    return frozenset(cores)
