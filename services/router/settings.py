"""The router's settings. Read by `services.cli.serve`, passed to `services.router.app.serve`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from baton.settings.groups import MIB, Count, Port, Seconds, ServiceSettings
from baton.settings.model_source import model_name
from baton.telemetry.request_traces import RequestLog


class EventIds(StrEnum):
    """Which streams have event ids. Some OpenAI clients break on them."""

    ASKED = "asked"
    ALWAYS = "always"


class RouterSettings(ServiceSettings):
    """OpenAI-compatible HTTP in front, placement and dispatch behind."""

    port: Port = 8000
    """HTTP port; 0 takes a free one."""

    served_model_name: str | None = None
    """The name clients use; default: the model's own."""

    router_id: Annotated[str, Field(min_length=1)] = "router-0"
    """Name of this router, unique among routers that share a state store."""

    max_queued_requests: Count = 256
    """Most requests waiting at the door; more are answered 429."""

    max_queued_tokens: Count = 262_144
    """Most prompt tokens waiting at the door; more are answered 429."""

    max_running_requests: Count = 256
    """Most requests given to workers at once; never more than their rows."""

    max_ttft_s: Seconds = 60.0
    """A request that would probably wait longer for its first token is answered 429; three quarters of what clients
    stand for is a good value, since forecasts miss."""

    request_deadline_s: Seconds = 600.0
    """Longest life of a request, from admission to its last token."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """How often in a row a request is tried without decode making a token of it, the first time included."""

    reserve_timeout_s: Seconds = 5.0
    """How long a decode worker may take to answer a promise, and how long the promise holds unused."""

    max_step_age_s: Seconds = 30.0
    """A worker whose engine has been in one step for longer is taken for dead."""

    api_keys_file: Path | None = None
    """File of API keys: a line for each, as `baton key` prints it; default: nobody is asked for one."""

    event_ids: EventIds = EventIds.ASKED
    """Whose events have ids, by which a client resumes: of clients that ask for `text/event-stream`, or all."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1024 * MIB)] = 4 * MIB
    """Largest HTTP request body."""

    request_log: RequestLog = RequestLog.ALL
    """Requests that get a log line at their end: all, notable (failed, replayed, preempted, slow) or off."""

    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP, e.g. http://collector:4318); default: no spans."""

    otlp_sample_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of requests that are exported as spans; a request with a `traceparent` follows its flag instead."""

    @property
    def public_model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or model_name(self.model)
