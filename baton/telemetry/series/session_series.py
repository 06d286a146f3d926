"""Series of the sessions between processes, at both ends."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from baton.telemetry.registry import REGISTRY, STEP_BUCKETS_S

SESSIONS = Gauge("baton_sessions", "Sessions with other processes that have not ended.", registry=REGISTRY)
SESSION_CONNECTIONS = Gauge(
    "baton_session_connections",
    "Connections that carry sessions now, by what they are: socket (a port of its own), grpc (a call) or memory.",
    ["wire"],
    registry=REGISTRY,
)
SESSION_EVENTS_TOTAL = Counter(
    "baton_session_events",
    "Of sessions: opened, broken, lost, closed, bad_frame, replayed_frame, duplicate_frame, late_message, reconciled.",
    ["event"],
    registry=REGISTRY,
)
SESSION_UNACKED_BYTES = Gauge("baton_session_unacked_bytes", "Bytes of frames without an ack.", registry=REGISTRY)
SESSION_WAITING_BYTES = Gauge("baton_session_waiting_bytes", "Estimate: bytes not in a frame yet.", registry=REGISTRY)
SESSION_RTT_SECONDS = Histogram(
    "baton_session_rtt_seconds", "From a ping to its pong.", buckets=STEP_BUCKETS_S, registry=REGISTRY
)
