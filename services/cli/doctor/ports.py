"""Checks of the ports that services listen on by default."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping

import httpx2

from baton.services.cli.doctor.results import DoctorResult, fail, ok, warn

_ASK_TIMEOUT_S = 2.0


def check_ports(host: str, ports: Mapping[str, int], *, required: str) -> Iterator[DoctorResult]:
    """Every port of `ports` (flag: number) is free. A busy one is a failure for the flag `required`, else a warning.

    A router that is ready at the required port is no failure: the doctor is often asked beside a running Baton.
    """
    busy = {flag: why for flag, port in ports.items() if (why := _why_busy(host, port)) is not None}
    for flag, why in busy.items():
        port = ports[flag]
        if flag == required and (state := _running_router(host, port)):
            yield ok(f"port {port}", f"a running Baton answers ({flag}): {state}")
            continue
        fix = f"end what holds it (ss -ltnp 'sport = :{port}'), or choose another: {flag} {port + 1000}"
        make = fail if flag == required else warn
        yield make(f"port {port}", f"{why} ({flag}); fine if it is a running Baton", fix)
    free = [str(port) for flag, port in ports.items() if flag not in busy]
    if free:
        yield ok("ports", f"{', '.join(free)} on {host} are free")


def _why_busy(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(socket.create_server((host, port), family=family))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    return None


def _running_router(host: str, port: int) -> str:
    """The state that a ready router shows at this address; empty if something else holds it, or it is not ready."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    with contextlib.suppress(httpx2.HTTPError, httpx2.InvalidURL, ValueError, AttributeError):
        with httpx2.Client(timeout=_ASK_TIMEOUT_S, trust_env=False, verify=False) as client:
            detail = str(client.get(f"http://{name}:{port}/ready").json().get("detail", ""))
        return detail if "linked prefill/decode pair" in detail else ""
    return ""
