"""The router's settings. Read by `baton.services.cli.serve`, passed to `baton.services.router.app.serve`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from baton.services.router.dispatch.placement.policy import PlacementPolicy
from baton.services.router.vision.remote.allowed_hosts import AllowedHosts
from baton.settings.groups import MIB, Count, Port, Seconds, ServiceSettings
from baton.settings.model_source import model_name
from baton.telemetry.request_traces import RequestLog


class EventIds(StrEnum):
    """Streams that get event ids. Some OpenAI clients fail on them."""

    ACCEPTED = "accepted"
    ALWAYS = "always"


class ReasoningParserChoice(StrEnum):
    """Formats of reasoning, and how to find the model's."""

    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    MISTRAL = "mistral"
    HARMONY = "harmony"


class ToolParserChoice(StrEnum):
    """Formats of tool calls, and how to find the model's."""

    AUTO = "auto"
    NONE = "none"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    GLM = "glm"
    HARMONY = "harmony"
    HERMES = "hermes"
    KIMI = "kimi"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    MISTRAL_LIST = "mistral_list"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3_coder"


class ReasoningField(StrEnum):
    """Fields of a message that hold the reasoning."""

    REASONING_CONTENT = "reasoning_content"
    REASONING = "reasoning"
    BOTH = "both"


def _listed(text: str | None) -> tuple[str, ...]:
    """What `text` lists, separated by commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


class RouterSettings(ServiceSettings):
    """Settings of the router: HTTP, admission and dispatch."""

    port: Port = 8000
    """HTTP port; 0 takes a free one."""

    metrics_port: Port = 9100
    """Port of Prometheus' /metrics, of /health, /ready and /admin, without API keys; 0 takes a free one."""

    served_model_name: str | None = None
    """Model names for clients, separated by commas; the first is that of metrics. Default: the model's own."""

    router_id: Annotated[str, Field(min_length=1)] = "router-0"
    """Name of this router, unique among routers that share a state store."""

    max_queued_mib: Count = 256
    """Memory of the requests in the admission queue; beyond it the newest of the longest queue get a 429."""

    max_running_requests: Count = 256
    """Most requests that run at once, bounded by the rows of the workers."""

    shutdown_delay_s: Annotated[float, Field(ge=0.0, le=600.0)] = 0.0
    """Time after SIGTERM in which requests are served while `/ready` answers 503, for load balancers to notice. Calls
    of dead routers are left to others from the start of it."""

    max_ttft_s: Seconds = 60.0
    """A request with a longer estimated time to its first token gets a 429. Three quarters of the clients' patience is
    a good value, since estimates miss."""

    max_tpot_s: Seconds | None = None
    """Objective on the time between tokens: a decode worker gets only as many rows as its announced step times promise
    to compute in it, at least one; other requests wait or get a 429 by `max_ttft_s`. None: all rows of the workers."""

    request_deadline_s: Seconds = 600.0
    """Longest life of a request, from admission to its last token."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Most attempts in a row without a token from decode, the first attempt included."""

    reserve_timeout_s: Seconds = 5.0
    """Longest wait for a decode worker's reply to a reservation, and longest life of an unused reservation."""

    sessions: bool = True
    """Talk to each worker in one session: decode's tokens come a message a step, and a broken connection is a pause and
    not another attempt. Without it, and with workers that do not speak sessions, a request has gRPC calls."""

    prefill_placement: PlacementPolicy = PlacementPolicy.CACHE_AWARE
    """Choice of a request's prefill worker: cache-aware (the least work, by what it has cached and what waits there),
    least-load (as if nothing were cached), two-choices (the less loaded of two random ones) or round-robin."""

    decode_placement: PlacementPolicy = PlacementPolicy.CACHE_AWARE
    """The same of the decode worker, among those linked to that prefill worker."""

    max_step_age_s: Seconds = 30.0
    """A worker whose engine stays in one step for longer counts as lost."""

    store_prompts: bool = True
    """Keep calls in the state store, so that any router can continue them. Otherwise only their own router can, from
    its memory; a client has the same for one request with `x-baton-store: none`."""

    api_keys_file: Path | None = None
    """File of API keys: one line each, as `baton key` prints it. Default: no key is required."""

    tenants_file: Path | None = None
    """TOML file with weights, places, rates and priorities of tenants. Default: all tenants are alike."""

    cors_origins: str | None = None
    """Origins whose pages may call from a browser, separated by commas; `*` for any, `none` for none. Default: any
    without API keys, none with them."""

    media_domains: str | None = None
    """Hosts from which `image_url` parts are fetched over https, separated by commas. Default: only `data:` URLs."""

    ui: bool = True
    """Serve the page at `/`: the live view of the cluster, and a chat."""

    demo_socket: Path | None = None
    """Unix socket of `baton up --demo`: the page can kill and drain workers over it. Default: it cannot."""

    event_ids: EventIds = EventIds.ACCEPTED
    """Clients that get event ids, with which a stream can be resumed: those that accept `text/event-stream`, or all."""

    reasoning_parser: ReasoningParserChoice = ReasoningParserChoice.AUTO
    """Format of the model's reasoning: auto (by the chat template), none (it stays in the text), think (`<think>`),
    mistral (`[THINK]`) or harmony (gpt-oss). The same for all routers of a cluster."""

    tool_parser: ToolParserChoice = ToolParserChoice.AUTO
    """Format of the model's tool calls (docs/tools.md): auto (by the chat template), none (no tools), or a name. The
    same for all routers of a cluster."""

    reasoning_field: ReasoningField = ReasoningField.BOTH
    """Field of messages and deltas with the reasoning: reasoning_content (DeepSeek), reasoning (vLLM) or both."""

    strict_fields: bool = False
    """Refuse unknown fields of a request. Otherwise the header `x-baton-unknown-fields` names them."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1024 * MIB)] = 4 * MIB
    """Largest HTTP request body, without files of images: a chat with those may have 48 MiB."""

    max_media_mib: Count = 256
    """Memory of the images of all requests that are not finished; beyond it a request with images gets a 429."""

    max_stored_media_mib: Count = 256
    """Memory of the state store for images of calls, of all routers together, for an hour each or twice
    `request_deadline_s`; a call beyond it is not durable."""

    request_log: RequestLog = RequestLog.ALL
    """Requests that get a log line at their end: all, notable (failed, replayed, preempted, slow) or off."""

    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP, e.g. http://collector:4318); default: no spans."""

    otlp_sample_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of requests that are exported as spans; a request with a `traceparent` follows its flag instead."""

    @property
    def public_model_name(self) -> str:
        """The first model name for clients."""
        return self.model_names[0]

    @property
    def reasoning_fields(self) -> tuple[str, ...]:
        """The fields of messages that hold reasoning."""
        both = (ReasoningField.REASONING_CONTENT.value, ReasoningField.REASONING.value)
        return both if self.reasoning_field is ReasoningField.BOTH else (self.reasoning_field.value,)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The origins of `cors_origins`."""
        if self.cors_origins is None:
            return ("*",) if self.api_keys_file is None else ()
        origins = _listed(self.cors_origins)
        return () if origins == ("none",) else origins

    @field_validator("media_domains")
    @classmethod
    def _check_media_domains(cls, value: str | None) -> str | None:
        AllowedHosts(_listed(value))
        return value

    @property
    def media_hosts(self) -> tuple[str, ...]:
        """The hosts of `media_domains`."""
        return _listed(self.media_domains)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model names for clients, without duplicates."""
        return tuple(dict.fromkeys(_listed(self.served_model_name))) or (model_name(self.model),)
