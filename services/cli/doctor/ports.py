"""Checks of the ports that services listen on by default."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping

from baton.services.cli.doctor.results import DoctorResult, fail, ok, warn


def check_ports(host: str, ports: Mapping[str, int], *, required: str) -> Iterator[DoctorResult]:
    """Every port of `ports` (flag: number) is free. A busy one is a failure for the flag `required`, else a warning."""
    busy = {flag: why for flag, port in ports.items() if (why := _why_busy(host, port)) is not None}
    for flag, why in busy.items():
        port = ports[flag]
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
