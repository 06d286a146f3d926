"""Checks of the Redis server: version, access, eviction, persistence and its clock, all read from the server itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import ResponseError

from baton.services.cli.doctor.results import DoctorResult, fail, ok, warn
from baton.store.durability import redis_durability
from baton.store.redis.client import RedisClient, without_password
from baton.store.store import Durability, StoreUnavailable

OLDEST_VERSION = (6, 2)
MAX_SKEW_S = 1.0
"""Beyond it times in logs of two machines cannot be compared."""
BROKEN_SKEW_S = 300.0
"""Beyond it certificates and sealed records may count as too old or as not valid yet."""
_TIMEOUT_S = 3.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost", None)


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What the server says about itself. `skew_s`: its clock less ours, within `error_s`."""

    info: Mapping[str, Any]
    config: Mapping[Any, Any]
    skew_s: float
    error_s: float


async def read_facts(url: str) -> RedisFacts:
    """Asks the server. Raises `StoreUnavailable`."""
    client = RedisClient(url, max_connections=1, timeout_s=_TIMEOUT_S)
    try:
        async with client.operation("answer"):
            info = await client.redis.info()
            try:
                config = await client.redis.config_get("*")
            except ResponseError:  # not allowed for this user
                config = {}
            sent = time.time()
            seconds, microseconds = await client.redis.time()
            received = time.time()
    finally:
        await client.close()
    skew = seconds + microseconds / 1e6 - (sent + received) / 2
    return RedisFacts(info, config, skew, (received - sent) / 2)


def unreachable(url: str, error: StoreUnavailable) -> DoctorResult:
    """The server did not answer, or did not let us in."""
    text = str(error)
    where = without_password(url)
    if any(word in text for word in ("NOAUTH", "WRONGPASS", "Authentication required", "invalid username-password")):
        fix = "give user and password in the URL: --redis-url redis://user:password@host:6379/0"
        return fail("redis", f"{where} refuses us: wrong password or none", fix)
    fix = "start a redis-server there, or correct --redis-url, such as redis://127.0.0.1:6379/0"
    return fail("redis", text.split(";")[0], fix)


def server_results(url: str, facts: RedisFacts) -> Iterator[DoctorResult]:
    """A result for each property that Baton relies on."""
    yield _version(url, facts.info)
    yield _role(facts.info)
    yield _access(url, facts.config)
    yield _eviction(facts.info)
    yield _persistence(facts)
    yield _clock(facts)


def _version(url: str, info: Mapping[str, Any]) -> DoctorResult:
    version = str(info.get("redis_version", "0"))
    found = f"{version} at {without_password(url)}"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_VERSION:
        return fail("redis", found, "run Redis 6.2 or later, or Valkey")
    return ok("redis", found)


def _role(info: Mapping[str, Any]) -> DoctorResult:
    if info.get("role") == "slave":
        return fail("redis role", "a replica, which takes no writes", "give the URL of its primary")
    if info.get("cluster_enabled"):
        return fail("redis role", "a Redis Cluster, whose slots split our scripts' keys", "run one server for Baton")
    return ok("redis role", "primary")


def _access(url: str, config: Mapping[Any, Any]) -> DoctorResult:
    parts = urlsplit(url)
    if parts.password:
        return ok("redis access", "with a password")
    if parts.scheme == "unix" or parts.hostname in _LOOPBACK:
        return ok("redis access", "without a password, from this machine")
    protected = "; it is in protected mode" if config.get("protected-mode") == "yes" else ""
    fix = "set requirepass (or an ACL user) and put it into the URL; --cluster-secret-file seals what Redis keeps"
    return warn("redis access", f"any machine that reaches {parts.hostname} may read and write{protected}", fix)


def _eviction(info: Mapping[str, Any]) -> DoctorResult:
    policy, limit = info.get("maxmemory_policy", "unknown"), int(info.get("maxmemory", 0))
    if limit and policy != "noeviction":
        fix = "redis-cli CONFIG SET maxmemory-policy noeviction (and in its configuration file)"
        return fail("redis eviction", f"{policy} at {limit} bytes: it drops records of running requests", fix)
    return ok("redis eviction", f"{policy}, {f'{limit} bytes' if limit else 'no limit'}")


def _persistence(facts: RedisFacts) -> DoctorResult:
    level = redis_durability(facts.info, facts.config)
    if level is Durability.ROUTER:
        fix = "appendonly yes and appendfsync no (or always); see docs/operations.md"
        return warn("redis persistence", "calls are lost when it restarts (x-baton-durable: false)", fix)
    return ok("redis persistence", f"acknowledged calls survive the loss of: {level.value}")


def _clock(facts: RedisFacts) -> DoctorResult:
    skew = abs(facts.skew_s) - facts.error_s
    found = f"{1000 * facts.skew_s:+.0f} ms (± {1000 * facts.error_s:.0f} ms) against this machine"
    fix = "synchronise both clocks: timedatectl set-ntp true, or chrony"
    if skew > BROKEN_SKEW_S:
        return fail("redis clock", found, fix)
    if skew > MAX_SKEW_S:
        return warn("redis clock", found, fix)
    return ok("redis clock", found)
