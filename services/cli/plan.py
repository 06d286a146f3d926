"""The command lines of the processes of `baton up`, made from its settings. Pure but for the search for free ports.

Called by `baton.services.cli.up`.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.services.cli.forwarded_flags import SERVICES, as_words, flags_for
from baton.services.cli.key import OwnKeys
from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.embedded_redis import EmbeddedRedis
from baton.services.cli.processes.ports import LOCALHOST, free_ports
from baton.services.cli.settings import UpSettings
from baton.settings.core_plan import MAX_WORKERS, CorePlan
from baton.settings.process import thread_variables

MAX_DEFAULT_THREADS = 4


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes to start, in order, and their addresses (host:port)."""

    commands: tuple[ChildCommand, ...]
    router_url: str
    prefill_metrics: tuple[str, ...]
    decode_metrics: tuple[str, ...]
    encode_metrics: tuple[str, ...]
    router_metrics: str
    page: bool = True
    """The router serves the page at `/`."""
    own_key: str | None = field(default=None, repr=False)
    """An API key for the smoke request, if the router requires one."""
    redis: EmbeddedRedis | None = None
    """The server to start before all of them; None: there is one."""

    @property
    def worker_metrics(self) -> dict[str, str]:
        """Addresses of the workers' metrics, each with the worker's name."""
        by_role = {"prefill": self.prefill_metrics, "decode": self.decode_metrics, "encode": self.encode_metrics}
        return {url: f"{role}-{number}" for role, urls in by_role.items() for number, url in enumerate(urls)}


@dataclass(frozen=True, slots=True)
class SharedFlags:
    """Flags that are the same for all processes of one system."""

    redis_url: str
    secret_file: Path
    demo_socket: Path | None = None
    core_lease_file: Path | None = None


def make_plan(
    settings: UpSettings, shared: SharedFlags, cores: Sequence[int], keys: OwnKeys | None = None
) -> LaunchPlan:
    """Workers first, the router last. `cores`: those of this process. Raises `OSError` for a busy port."""
    port = _choose_port(settings.host, settings.port)
    roles, threads = _roles(settings), num_threads(settings, cores)
    settings = settings.model_copy(update={"threads": threads})
    *ports, admin_port = free_ports(2 * len(roles) + 1)
    shares = share_cores(cores, len(roles), threads)
    commands, metrics = [], []
    for index, (name, role) in enumerate(roles.items()):
        rpc_port, metrics_port = ports[2 * index : 2 * index + 2]
        flags = _worker_flags(name, rpc_port, metrics_port, shares[index])
        if role == "decode":
            flags["token_budget"] = settings.decode_token_budget
        if shared.core_lease_file is not None and role != "encode":
            flags["core_lease_file"] = shared.core_lease_file
        commands.append(_serve(role, name, settings, shared, flags))
        metrics.append(f"http://{LOCALHOST}:{metrics_port}/metrics")
    router_flags: dict[str, Any] = {"host": settings.host, "port": port, "metrics_port": admin_port}
    if shared.demo_socket is not None:
        router_flags["demo_socket"] = shared.demo_socket
    if keys is not None:
        router_flags["api_keys_file"] = keys.file
    commands.append(_serve("router", "router", settings, shared, router_flags))
    return LaunchPlan(
        commands=tuple(commands),
        router_url=f"http://{callable_host(settings.host)}:{port}",
        prefill_metrics=tuple(metrics[: settings.prefill]),
        decode_metrics=tuple(metrics[settings.prefill : settings.prefill + settings.decode]),
        encode_metrics=tuple(metrics[settings.prefill + settings.decode :]),
        router_metrics=f"http://{callable_host(settings.host)}:{admin_port}/metrics",
        page=settings.ui is not False,
        own_key=keys.key if keys is not None else None,
    )


def plan_cores(settings: UpSettings, cores: Sequence[int]) -> CorePlan | None:
    """The cores that workers lend each other; None without a second worker's core, or with too many workers."""
    roles = _roles(settings)
    names = [name for name, role in roles.items() if role != "encode"]  # a tower runs in torch, on its own cores
    if not settings.lend_cores or not 1 < len(names) <= MAX_WORKERS:
        return None
    shares = share_cores(cores, len(roles), num_threads(settings, cores))
    plan = CorePlan(dict(zip(names, shares, strict=False)))
    return plan if any(map(plan.borrowable, names)) else None


def num_threads(settings: UpSettings, cores: Sequence[int]) -> int:
    """Threads of each worker. Where there are enough cores, one is left to the router, Redis and event loops."""
    if settings.threads is not None:
        return settings.threads
    return min(MAX_DEFAULT_THREADS, max(1, (len(cores) - 1) // len(_roles(settings))))


def share_cores(cores: Sequence[int], num_workers: int, threads: int) -> list[tuple[int, ...]]:
    """The cores of each worker; shared round robin if there are too few."""
    return [
        tuple(sorted({cores[(index * threads + k) % len(cores)] for k in range(threads)}))
        for index in range(num_workers)
    ]


def _roles(settings: UpSettings) -> dict[str, str]:
    """The role of each worker by its name, in the order of their start."""
    counts = {"prefill": settings.prefill, "decode": settings.decode, "encode": settings.encode}
    return {f"{role}-{number}": role for role, count in counts.items() for number in range(count)}


def callable_host(host: str) -> str:
    """An address that reaches a server listening on `host`."""
    return LOCALHOST if host in {"0.0.0.0", "::", ""} else host


def require_port(host: str, port: int) -> None:
    """Raises `OSError` for a busy port."""
    if port:
        _choose_port(host, port)


def _choose_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises `OSError` for a busy port, before any process is started."""
    with _listening(host, port or free_ports(1)[0]) as probe:
        return int(probe.getsockname()[1])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        what = f"HTTP port {port} on {host} is in use by another process (for example --port {port + 1})"
        raise OSError(errno.EADDRINUSE, what) from None


def _worker_flags(id: str, port: int, metrics_port: int, cores: Sequence[int]) -> dict[str, Any]:
    return {
        "host": LOCALHOST,
        "worker_id": id,
        "port": port,
        "metrics_port": metrics_port,
        "advertise_address": f"{LOCALHOST}:{port}",
        "cpu_affinity": ",".join(map(str, cores)),
    }


def _serve(service: str, name: str, settings: UpSettings, shared: SharedFlags, own: dict[str, Any]) -> ChildCommand:
    """The command of one process. Raises `ValidationError` for flags that its service refuses."""
    common = {"redis_url": shared.redis_url, "cluster_secret_file": shared.secret_file}
    flags = {**flags_for(service, settings), **common, **own}
    SERVICES[service](**flags)  # before anything is started, and with the flag's name
    words = ("serve", service, *as_words(flags))
    arguments = (sys.executable, "-m", "baton.services.cli.main", *words)
    return ChildCommand(name, arguments, thread_variables(settings.threads or 1), words)
