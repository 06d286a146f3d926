"""Settings of `baton up`, and the table of all settings. Read by `services.cli` and `scripts/generate_docs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, model_validator

from baton.settings.base import Settings
from baton.settings.groups import ClusterTrustSettings, Count, Dtype, LogLevel, Port, RedisUrl, Seconds, Transport
from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings
from services.router.settings import RouterSettings


class UpSettings(Settings):
    """One machine's system: Redis, a router, prefill and decode workers."""

    model: str = "bundled"
    """`bundled`, a directory with a Hugging Face model, or a Hugging Face id such as `Qwen/Qwen3-0.6B`."""

    prefill: Annotated[int, Field(ge=0)] = 1
    """Number of prefill workers; 0: decode workers prefill for themselves."""

    decode: Count = 1
    """Number of decode workers."""

    decode_token_budget: Annotated[int, Field(ge=0)] = 0
    """Most tokens a step of a decode worker, prompts included, when it prefills for itself too; 0: it never does."""

    host: str = "127.0.0.1"
    """Interface of the router; workers always listen on 127.0.0.1."""

    port: Port = 8000
    """HTTP port of the router; 0 takes a free one."""

    redis_url: RedisUrl | None = None
    """A Redis that runs already; default: one is started and stopped with the system."""

    cluster_secret_file: Path | None = None
    """File with the secret that router and workers share; default: a random one, removed at the end."""

    api_keys_file: Path | None = None
    """File of API keys, as `baton key` prints them; default: the router asks nobody for one."""

    dtype: Dtype = Dtype.AUTO
    """Number format of weights and KV: auto, float32 or bfloat16."""

    transport: Transport = Transport.AUTO
    """How pages move: auto, nixl or stream."""

    page_size: Count = 16
    """Token slots of a page."""

    kv_memory_mib: Count = 512
    """Memory for each worker's pool, in MiB."""

    threads: Count = 1
    """Compute threads, and cores of its own, of each worker."""

    log_dir: Path | None = None
    """Where the processes' logs go; default: a temporary directory, removed at the end."""

    log_level: LogLevel = LogLevel.INFO
    """The least severe log line that is written."""

    start_timeout_s: Seconds = 300.0
    """How long all may take until the first request has been served."""

    drain_timeout_s: Seconds = 10.0
    """How long running requests may take to finish after Ctrl-C."""

    @model_validator(mode="after")
    def _has_prefill(self) -> Self:
        if self.prefill == 0 and self.decode_token_budget == 0:
            raise ValueError("without prefill workers decode_token_budget must say how decode workers prefill")
        return self


class ClusterClientSettings(ClusterTrustSettings):
    """What a command needs to find workers in the state store and to call them."""

    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """The state store in which the workers are announced: redis://, rediss:// or unix://."""


class DrainSettings(ClusterClientSettings):
    """Take a worker out of service without losing a request."""

    wait_s: Seconds = 120.0
    """How long the worker may take to finish and exit; it goes on draining after that."""


class TraceSettings(ClusterClientSettings):
    """Show where the time of one request went."""

    router: str = "http://127.0.0.1:8000"
    """URL of any router of the cluster."""

    api_key: SecretStr | None = None
    """API key of the request's tenant, where the router asks for one; better given as a variable than as a flag."""

    workers: bool = False
    """Read the workers' recent attempts too: shows a request whose router has ended. Needs the state store."""


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
    """How long to wait for the workers, and for each sequence."""


SERVICES: dict[str, type[Settings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
"""Settings of `baton serve NAME`."""

COMMANDS: dict[str, type[Settings]] = {
    "up": UpSettings,
    "drain": DrainSettings,
    "trace": TraceSettings,
    "replay": ReplaySettings,
    **{f"serve {name}": model for name, model in SERVICES.items()},
}
"""Settings of every command: the variables they read are the known ones."""
