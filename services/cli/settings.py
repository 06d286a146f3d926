"""Settings of `baton up`, and the table of all settings. Read by `baton.services.cli` and
`scripts/generate_docs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, model_validator

from baton.services.cli.calibration.prediction import Deployment
from baton.services.cli.forwarded_flags import SERVICES as SERVICES
from baton.services.cli.forwarded_flags import ForwardedFlags
from baton.settings.base import Settings
from baton.settings.choices import Dtype, LogLevel, Transport, VisionKind
from baton.settings.groups import ClusterTrustSettings, Count, Port, RedisUrl, Seconds

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class UpSettings(ForwardedFlags):
    """One machine's system: Redis, a router, prefill, decode and encode workers."""

    model: str = "bundled"
    """`bundled`, `bundled-vision`, a directory with a Hugging Face model, or an id of its Hub: `Qwen/Qwen3-0.6B`."""

    deployment: Deployment = Deployment.AUTO
    """Workers: split (prefill and decode apart), colocated (decode workers on all cores compute prompts, too, in
    chunks), or auto: split, but on at most four cores, where no worker is named and the model is not bundled, what step
    times of this machine predict to serve more. They are measured once a model."""

    prefill: Annotated[int, Field(ge=0)] = 1
    """Number of prefill workers; 0: decode workers compute prompts themselves."""

    decode: Count = 1
    """Number of decode workers."""

    encode: Annotated[int, Field(ge=0)] = 0
    """Number of encode workers, for a model that is served with images; 0: prefill workers encode."""

    decode_token_budget: Annotated[int, Field(ge=0)] = 0
    """Most tokens a step of a decode worker, prompts included, if it computes prompts too; 0: it never does."""

    host: str = "127.0.0.1"
    """Interface of the router; workers always listen on 127.0.0.1."""

    port: Port = 8000
    """HTTP port of the router; 0 takes a free one."""

    redis_url: RedisUrl | None = None
    """URL of a running Redis; default: one is started and stopped with the system."""

    cluster_secret_file: Path | None = None
    """File with the secret of router and workers; default: a random one, removed at the end."""

    api_keys_file: Path | None = None
    """File of API keys, as `baton key` prints them; default: no keys are required."""

    dtype: Dtype = Dtype.AUTO
    """Number format of weights and KV: auto, float32 or bfloat16."""

    transport: Transport = Transport.AUTO
    """Transport of pages: auto, nixl or stream."""

    page_size: Count = 16
    """Token slots of a page."""

    kv_memory_mib: Count = 512
    """Memory for each worker's pool, in MiB."""

    threads: Count | None = None
    """Compute threads and cores of each worker; default: the cores shared evenly, one left out for the router where
    there are more than workers, and at most four."""

    lend_cores: bool = True
    """Let workers compute on the cores of others, too, while those are idle."""

    log_dir: Path | None = None
    """Directory of the processes' logs; default: a temporary one, removed at the end."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe log level that is written."""

    start_timeout_s: Seconds = 300.0
    """Longest time from the start to the first answered request."""

    drain_timeout_s: Seconds = 10.0
    """Time for running requests to finish after Ctrl-C."""

    demo: bool = False
    """Show buttons on the page that kill and drain workers, which are then started again. On this machine only."""

    @model_validator(mode="after")
    def _demo_stays_here(self) -> Self:
        if self.demo and self.host not in LOOPBACK:
            raise ValueError("demo lets whoever opens the page kill workers: leave --host at 127.0.0.1")
        return self

    @model_validator(mode="after")
    def _names_workers_once(self) -> Self:
        if self.deployment is not Deployment.COLOCATED:
            return self
        if self.prefill_is_named or self.encode:
            raise ValueError("a colocated deployment has decode workers only: leave out prefill and encode")
        if getattr(self, "vision", None) in (VisionKind.LOCAL, VisionKind.REMOTE):  # a forwarded flag
            raise ValueError("a colocated deployment serves no images, which prefill workers encode: leave out vision")
        return self

    @property
    def prefill_is_named(self) -> bool:
        """True if the number of prefill workers was given, and is not 0."""
        return "prefill" in self.model_fields_set and self.prefill > 0

    @model_validator(mode="after")
    def _has_prefill(self) -> Self:
        is_colocated = self.deployment is Deployment.COLOCATED
        if self.prefill == 0 and self.decode_token_budget == 0 and not is_colocated:
            raise ValueError("without prefill workers decode_token_budget must say how decode workers prefill")
        return self


class ClusterClientSettings(ClusterTrustSettings):
    """Settings of commands that find workers in the state store and call them."""

    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """URL of the state store with the workers' records: redis://, rediss:// or unix://."""


class DrainSettings(ClusterClientSettings):
    """Take a worker out of service without losing a request."""

    wait_s: Seconds = 120.0
    """Longest wait for the worker's exit; it goes on draining after that."""


class ChatSettings(Settings):
    """Chat with a model of a running cluster."""

    router: str = "http://127.0.0.1:8000"
    """URLs of routers of one cluster, separated by commas; a broken answer goes on at the next one."""

    api_key: SecretStr | None = None
    """API key, if keys are required; a variable is safer than a flag."""

    model: str | None = None
    """Name of the model, as /v1/models lists it; default: the first one there."""

    system: str | None = None
    """System prompt."""

    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """0 is greedy; default: what the model's makers recommend."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the probability that tokens are drawn from."""

    max_tokens: Count | None = None
    """Longest answer; default: what is left of the context."""

    seed: int | None = None
    """Seed of sampling; equal seeds give equal answers."""


class DoctorSettings(ClusterTrustSettings):
    """Check this machine, Redis and the registered workers."""

    redis_url: RedisUrl | None = None
    """URL of the state store to check, with the workers in its registry; default: a server that `baton up` starts."""

    model: str | None = None
    """Model whose files are checked, and compared with those of the registered workers; default: none."""

    host: str = "127.0.0.1"
    """Interface whose ports are checked."""

    port: Port = 8000
    """HTTP port that the router is to have."""


class TopSettings(Settings):
    """Show the cluster in this terminal."""

    router: str = "http://127.0.0.1:8000"
    """URLs of routers of one cluster, separated by commas; the first one that answers is asked."""

    api_key: SecretStr | None = None
    """API key of an operator, if keys are required; a variable is safer than a flag."""

    interval_s: Seconds = 1.0
    """Time between two snapshots."""


class RoleSettings(ClusterClientSettings):
    """Show a worker's budgets, or change those that are given; the others stay."""

    prefill_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of a step in which prompts are computed; 0: no new prompt is taken."""

    rows: Annotated[int, Field(ge=0)] | None = None
    """Most sequences generated at once; 0: no new one is taken."""

    reservations: Annotated[int, Field(ge=0)] | None = None
    """Most reservations at once that are no sequence yet."""


class TraceSettings(ClusterClientSettings):
    """Show where the time of one request went."""

    router: str = "http://127.0.0.1:8000"
    """URL of any router of the cluster."""

    api_key: SecretStr | None = None
    """API key of the request's tenant, if keys are required; a variable is safer than a flag."""

    workers: bool = False
    """Read the workers' recent attempts, too: shows a request whose router has ended. Needs the state store."""


class ReplaySettings(ClusterClientSettings):
    """Compute a stored request again and compare its tokens."""

    model: str = "bundled"
    """The model that the workers serve: its tokenizer and chat template make the prompt's tokens again."""

    prefill: str | None = None
    """Prefill worker to compute on; default: any."""

    decode: str | None = None
    """Decode worker to compute on; default: any."""

    fresh: bool = False
    """Compute every page again instead of using the workers' prefix caches."""

    wait_s: Seconds = 30.0
    """Longest wait for the workers, and for each sequence."""


COMMANDS: dict[str, type[Settings]] = {
    "up": UpSettings,
    "chat": ChatSettings,
    "doctor": DoctorSettings,
    "top": TopSettings,
    "drain": DrainSettings,
    "role": RoleSettings,
    "trace": TraceSettings,
    "replay": ReplaySettings,
    **{f"serve {name}": model for name, model in SERVICES.items()},
}
"""Settings of every command: the variables they read are the known ones."""
