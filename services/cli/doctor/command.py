"""`baton doctor`: runs the checks in the order in which they block, and prints each result as it comes.

Changes nothing. Registered by `baton.services.cli.main`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from baton.services.cli.doctor import devices, host, ports, probes, redis_server
from baton.services.cli.doctor.results import DoctorResult, all_pass, as_json, fail, ok
from baton.services.cli.doctor.workers import worker_results
from baton.services.cli.processes.local_redis import HOW_TO_GET_ONE, find_server
from baton.services.cli.settings import COMMANDS, DoctorSettings
from baton.services.decode.settings import DecodeSettings
from baton.services.prefill.settings import PrefillSettings
from baton.services.router.settings import RouterSettings
from baton.settings.base import SettingsError, refuse_unknown_variables
from baton.settings.model_source import resolve_model
from baton.settings.text_digest import text_digest
from baton.settings.trust import read_trust
from baton.store.connect import connect
from baton.store.store import StoreUnavailable

Group = Callable[[DoctorSettings], Coroutine[Any, Any, Iterable[DoctorResult]]]

_ROOT = Path("/")


def doctor(
    *,
    json: Annotated[bool, Parameter(negative=(), help="Print one JSON object.")] = False,
    settings: Annotated[DoctorSettings | None, Parameter(name="*")] = None,
) -> int:
    """Check this machine, Redis and the workers, and say how to fix what fails. Exit with 1 if a check fails."""
    refuse_unknown_variables(COMMANDS.values())
    return asyncio.run(_print_results(settings or DoctorSettings(), as_one_object=json))


async def _print_results(settings: DoctorSettings, *, as_one_object: bool) -> int:
    results: list[DoctorResult] = []
    async for result in run_checks(settings):
        results.append(result)
        if not as_one_object:
            print(result.line(), flush=True)
    if as_one_object:
        print(as_json(results))
    return 0 if all_pass(results) else 1


async def run_checks(settings: DoctorSettings, root: Path = _ROOT) -> AsyncIterator[DoctorResult]:
    """Every result, in order. A check that fails itself is a result, too: the others go on."""

    async def this_machine(_: DoctorSettings) -> Iterable[DoctorResult]:
        return _host_results(root)

    async def engine(_: DoctorSettings) -> Iterable[DoctorResult]:
        answer = await probes.ask_engine()
        return [*probes.engine_results(answer), devices.check_gpu(root, probes.torch_devices(answer))]

    groups: tuple[Group, ...] = (this_machine, engine, _model, _transfer, _ports, _redis)
    for group in groups:
        try:
            found = list(await group(settings))
        except Exception as error:  # the root of one group of checks
            what = group.__name__.strip("_").replace("_", " ")
            found = [fail(f"check of {what}", f"{type(error).__name__}: {error}", "report this as a bug of the doctor")]
        for result in found:
            yield result


def _host_results(root: Path) -> Iterable[DoctorResult]:
    return [
        host.check_python(),
        *host.check_packages(),
        host.check_cpu(root),
        host.check_memory(root),
        *devices.check_rdma(root),
        host.check_memlock(devices.has_rdma(root)),
        host.check_huge_pages(root),
    ]


async def _model(settings: DoctorSettings) -> Iterable[DoctorResult]:
    if settings.model is None:
        return []
    try:
        directory = await _files(settings.model)
        return [ok("model", f"{directory}, text digest {text_digest(directory)}")]
    except SettingsError as error:
        return [fail("model", f"{error.what}: {error.why}", error.hint)]


async def _files(model: str) -> Path:
    """The model's directory, of what is on this machine: a check downloads nothing. Raises `SettingsError`."""
    return await asyncio.to_thread(partial(resolve_model, model, download=False))


async def _transfer(_: DoctorSettings) -> Iterable[DoctorResult]:
    if host.nixl_missing():
        return []  # the line about packages says so
    return [probes.loopback_result(await probes.ask_loopback())]


async def _ports(settings: DoctorSettings) -> Iterable[DoctorResult]:
    numbers = {"--port": settings.port, "router --metrics-port": RouterSettings.model_fields["metrics_port"].default}
    for name, model in (("prefill", PrefillSettings), ("decode", DecodeSettings)):
        for field in ("port", "metrics_port"):
            numbers[f"{name} --{field.replace('_', '-')}"] = model.model_fields[field].default
    return ports.check_ports(settings.host, numbers, required="--port")


async def _redis(settings: DoctorSettings) -> Iterable[DoctorResult]:
    """The server and the workers in its registry; without a URL, whether `baton up` could start one."""
    url = settings.redis_url
    if url is None:
        binary = find_server()
        if binary is None:
            return [fail("redis", "no server to start, and no --redis-url", HOW_TO_GET_ONE)]
        return [ok("redis", f"baton up would start {binary}; give --redis-url to check a running one")]
    try:
        facts = await redis_server.read_facts(url)
    except StoreUnavailable as error:
        return [redis_server.unreachable(url, error)]
    return [*redis_server.server_results(url, facts), *await _workers(url, settings)]


async def _workers(url: str, settings: DoctorSettings) -> Iterable[DoctorResult]:
    try:
        trust = read_trust(settings)
        own_text = (
            None if settings.model is None else text_digest(await asyncio.to_thread(resolve_model, settings.model))
        )
    except SettingsError as error:
        return [fail("workers", f"{error.what}: {error.why}", error.hint)]
    store = await connect(url)
    try:
        records = await store.workers()
    finally:
        await store.close()
    signed = [record for record in records if trust.verify(record)]
    return worker_results(signed, [record for record in records if record not in signed], own_text)
