"""The command lines of the processes of `baton up`, made from its settings. Pure but for the search for free ports.

Called by `services.cli.up`.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.settings.process import thread_variables
from services.cli.forwarded_flags import SERVICES, as_words, flags_for
from services.cli.key import OwnKeys
from services.cli.processes.supervisor import ChildCommand
from services.cli.settings import UpSettings

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes to start, in order, and their addresses (host:port)."""

    commands: tuple[ChildCommand, ...]
    router_url: str
    prefill_metrics: tuple[str, ...]
    decode_metrics: tuple[str, ...]
    router_metrics: str
    page: bool = True
    """The router serves the page at `/`."""
    own_key: str | None = field(default=None, repr=False)
    """An API key for the smoke request, if the router requires one."""


@dataclass(frozen=True, slots=True)
class SharedFlags:
    """Flags that are the same for all processes of one system."""

    redis_url: str
    secret_file: Path
    demo_socket: Path | None = None


def make_plan(
    settings: UpSettings, shared: SharedFlags, cores: Sequence[int], keys: OwnKeys | None = None
) -> LaunchPlan:
    """Workers first, the router last. `cores`: those of this process. Raises `OSError` for a busy port."""
    port = _choose_port(settings.host, settings.port)
    num_workers = settings.prefill + settings.decode
    *ports, admin_port = free_ports(2 * num_workers + 1)
    shares = share_cores(cores, num_workers, settings.threads)
    commands, metrics = [], []
    for index in range(num_workers):
        role, number = ("prefill", index) if index < settings.prefill else ("decode", index - settings.prefill)
        rpc_port, metrics_port = ports[2 * index : 2 * index + 2]
        flags = _worker_flags(f"{role}-{number}", rpc_port, metrics_port, shares[index])
        if role == "decode":
            flags["token_budget"] = settings.decode_token_budget
        commands.append(_serve(role, f"{role}-{number}", settings, shared, flags))
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
        decode_metrics=tuple(metrics[settings.prefill :]),
        router_metrics=f"http://{callable_host(settings.host)}:{admin_port}/metrics",
        page=settings.ui is not False,
        own_key=keys.key if keys is not None else None,
    )


def share_cores(cores: Sequence[int], num_workers: int, threads: int) -> list[str]:
    """The cores of each worker, in the form of `--cpu-affinity`; shared round robin if there are too few."""
    return [
        ",".join(str(core) for core in sorted({cores[(index * threads + k) % len(cores)] for k in range(threads)}))
        for index in range(num_workers)
    ]


def free_ports(count: int) -> list[int]:
    """Different ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [each.getsockname()[1] for each in sockets]


def callable_host(host: str) -> str:
    """An address that reaches a server listening on `host`."""
    return LOCALHOST if host in {"0.0.0.0", "::", ""} else host


def _choose_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises `OSError` for a busy port, before any process is started."""
    with socket.create_server((callable_host(host), 0)) if port == 0 else _listening(host, port) as probe:
        return int(probe.getsockname()[1])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        what = f"HTTP port {port} on {host} is in use by another process (for example --port {port + 1})"
        raise OSError(errno.EADDRINUSE, what) from None


def _worker_flags(id: str, port: int, metrics_port: int, cores: str) -> dict[str, Any]:
    return {
        "host": LOCALHOST,
        "worker_id": id,
        "port": port,
        "metrics_port": metrics_port,
        "advertise_address": f"{LOCALHOST}:{port}",
        "cpu_affinity": cores,
    }


def _serve(service: str, name: str, settings: UpSettings, shared: SharedFlags, own: dict[str, Any]) -> ChildCommand:
    """The command of one process. Raises `ValidationError` for flags that its service refuses."""
    common = {"redis_url": shared.redis_url, "cluster_secret_file": shared.secret_file}
    flags = {**flags_for(service, settings), **common, **own}
    SERVICES[service](**flags)  # before anything is started, and with the flag's name
    arguments = (sys.executable, "-m", "services.cli.main", "serve", service, *as_words(flags))
    return ChildCommand(name, arguments, thread_variables(settings.threads))
