"""`baton up`: starts a whole system on this machine, checks it with a request, and stops it again.

1. Check variables, the model's files, Redis and the port.
2. Start Redis unless one is given, choose the deployment, start workers and router. Each worker gets its own cores.
3. Wait until the router is ready and a smoke_request's pages have moved.
4. Serve until Ctrl-C or SIGTERM; start a process that died once more, a service unless that happens too often.
5. Stop the router (it drains), decode, prefill, encode, Redis; leave nothing behind. A second signal kills what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx2
from cyclopts import Parameter
from rich.console import Console

from baton.rpc.shutdown import shutdown_event
from baton.services.cli import smoke_request
from baton.services.cli.calibration.deployment import choose_deployment
from baton.services.cli.doctor.redis_server import read_facts, server_results
from baton.services.cli.doctor.results import CheckStatus
from baton.services.cli.errors import EXIT_INTERRUPTED, StartFailed
from baton.services.cli.key import own_keys
from baton.services.cli.plan import LaunchPlan, SharedFlags, make_plan, plan_cores, require_port
from baton.services.cli.processes.demo_control import DemoServer
from baton.services.cli.processes.embedded_redis import EmbeddedRedis, embedded_redis
from baton.services.cli.processes.fork_process import close_early, take_early
from baton.services.cli.processes.fork_server import ServiceForkServer, can_fork
from baton.services.cli.processes.interrupts import interrupted_once
from baton.services.cli.processes.restart_budget import RestartBudget
from baton.services.cli.processes.supervisor import Child, Supervisor
from baton.services.cli.settings import COMMANDS, UpSettings
from baton.services.cli.worker_packages import require_worker_packages
from baton.settings.base import refuse_unknown_variables
from baton.settings.core_plan import CorePlan
from baton.settings.model_source import resolve_model
from baton.settings.process import usable_cores
from baton.store.connect import connect
from baton.store.store import StoreUnavailable

T = TypeVar("T")
SECRET_BYTES = 32
STOP_ORDER = ("router", "decode", "prefill", "encode")
_STOP_SLACK_S = 5.0
_HTTP_TIMEOUT_S = 60.0
_EXIT_REPORT_S = 1.0


def up(
    model: Annotated[str | None, Parameter(show=True, help="The model; the same as --model.")] = None,
    /,
    *,
    settings: Annotated[UpSettings | None, Parameter(name="*")] = None,
) -> int:
    """Start the whole system on this machine, check it with a request, and serve until Ctrl-C."""
    refuse_unknown_variables(COMMANDS.values())
    require_worker_packages("baton up")
    chosen = settings or UpSettings()
    if model is not None:
        chosen = chosen.model_copy(update={"model": model})
    console = Console(stderr=True)
    with console.status(f"finding model {chosen.model}"):
        resolve_model(chosen.model)
    require_port(chosen.host, chosen.port)
    with (
        interrupted_once() as interrupts,
        _redis(chosen.redis_url, console) as (redis_url, redis),
        _secret_file(chosen.cluster_secret_file) as secret_file,
        own_keys(chosen.api_keys_file) as keys,
        _log_dir(chosen.log_dir) as log_dir,
        _demo_socket(chosen.demo) as demo_socket,
        closing(interrupts),
    ):
        chosen = _with_deployment(chosen, console)
        with _core_lease_file(plan_cores(chosen, usable_cores())) as core_lease_file:
            shared = SharedFlags(redis_url, secret_file, demo_socket, core_lease_file)
            plan = replace(make_plan(chosen, shared, usable_cores(), keys), redis=redis)
            with _fork_server(plan, log_dir) as fork_server, closing(interrupts):
                return asyncio.run(run_plan(plan, chosen, log_dir, console, demo_socket, fork_server))


def _with_deployment(settings: UpSettings, console: Console) -> UpSettings:
    """The settings with the workers to start, told where they were chosen."""
    with console.status("looking for step times of this machine, by which the workers are chosen"):
        chosen = choose_deployment(settings, usable_cores())
    if chosen.note:
        console.print(chosen.note, highlight=False, markup=False)
    return chosen.settings


async def run_plan(
    plan: LaunchPlan,
    settings: UpSettings,
    log_dir: Path,
    console: Console,
    demo_socket: Path | None = None,
    fork_server: ServiceForkServer | None = None,
) -> int:
    """Starts, checks, serves and stops. Returns 0 after a signal, `EXIT_INTERRUPTED` after a second one.

    Raises `StartFailed` otherwise.
    """
    supervisor = Supervisor(log_dir, fork_server)
    with shutdown_event(supervisor.kill) as stop:
        async with supervisor, DemoServer(supervisor).serving(demo_socket):
            try:
                async with contextlib.AsyncExitStack() as watches:
                    if await _start_all(plan, settings, supervisor, stop, console, watches):
                        await _serve(plan, settings, supervisor, stop, console)
            finally:
                stop.set()  # from now on, the first signal kills
                await _stop(supervisor, settings, console)
    return EXIT_INTERRUPTED if supervisor.was_killed else 0


async def _serve(
    plan: LaunchPlan, settings: UpSettings, supervisor: Supervisor, stop: asyncio.Event, console: Console
) -> None:
    """Checks the started processes and keeps them running; returns after a signal to stop. Raises `StartFailed`."""

    def watch() -> Coroutine[Any, Any, Child | None]:
        return _first_exit(supervisor, stop)

    async with _task(watch()) as exit_watch:
        await _wait_until_serving(plan, settings, exit_watch, console)
        await _keep_running(supervisor, stop, exit_watch, watch, console)


async def _start_all(
    plan: LaunchPlan,
    settings: UpSettings,
    supervisor: Supervisor,
    stop: asyncio.Event,
    console: Console,
    watches: contextlib.AsyncExitStack,
) -> bool:
    """Starts the processes; False if a signal to stop comes before. Redis is kept running until `watches` closes.

    Raises `StartFailed`, also if time is up.
    """

    async def start() -> None:
        if plan.redis is not None:
            tell = partial(console.print, markup=False, highlight=False)
            kept = plan.redis.keep_running(supervisor, await plan.redis.start(supervisor), tell)
            await watches.enter_async_context(_task(kept))
        for command in sorted(plan.commands, key=lambda command: command.name != "router"):
            await supervisor.start(command)  # the router first: its fork need not wait for PyTorch

    with console.status("importing what the processes share"):
        return await _done_before(stop, start(), settings.start_timeout_s)


async def _done_before(stop: asyncio.Event, work: Coroutine[Any, Any, object], timeout_s: float | None = None) -> bool:
    """True after `work`; False if a signal to stop comes first and cancels it. Raises `StartFailed` if time is up."""
    async with _task(work) as working, _task(stop.wait()) as stop_asked:
        done, _ = await asyncio.wait([working, stop_asked], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return False
        if timeout_s is not None and not done:
            raise _too_late(timeout_s)
        await working
        return True


async def _first_exit(supervisor: Supervisor, stop: asyncio.Event) -> Child | None:
    """The first service that ends by itself; None if a signal to stop comes first."""
    async with _task(stop.wait()) as stop_asked, _task(supervisor.first_exit()) as exit_:
        await asyncio.wait([stop_asked, exit_], return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else await exit_


async def _keep_running(
    supervisor: Supervisor,
    stop: asyncio.Event,
    exit_watch: asyncio.Task[Child | None],
    watch: Callable[[], Coroutine[Any, Any, Child | None]],
    console: Console,
) -> None:
    """Restarts services that end; returns after a signal to stop. Raises `StartFailed` after too many restarts.

    `exit_watch`: the first call of `watch`.
    """
    restarts = RestartBudget()
    exited = await exit_watch
    while exited is not None:
        if exited in supervisor.asked:
            console.print(f"{exited.name} was ended from the page. It is started again.", highlight=False)
        elif not restarts.allows(time.monotonic()):
            raise StartFailed(exited.exit_report())
        else:
            console.print(exited.exit_report(), "It is started again.", sep="\n", markup=False, highlight=False)
        await _done_before(stop, supervisor.restart(exited))
        exited = await watch()


async def _wait_until_serving(
    plan: LaunchPlan, settings: UpSettings, exit_watch: asyncio.Task[Child | None], console: Console
) -> None:
    """Returns when the smoke request is answered, or to stop. Raises `StartFailed` if a child ends or time is up."""
    split = settings.decode_token_budget == 0  # otherwise decode may have computed the first prompt itself
    async with _task(_smoke_test(plan, split, exit_watch, console)) as check:
        await asyncio.wait([check, exit_watch], timeout=settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if check.done() and check.exception() is not None:
            # The cause may be a process that ended: its log says more than our failed call.
            await asyncio.wait([exit_watch], timeout=_EXIT_REPORT_S)
        if exit_watch.done():
            if (exited := await exit_watch) is not None:
                raise StartFailed(exited.exit_report())
            return
        if not check.done():
            raise _too_late(settings.start_timeout_s)
        await check


def _too_late(timeout_s: float) -> StartFailed:
    hint = f"Keep the logs and read them (--log-dir ./logs), or give it longer (--start-timeout-s {2 * timeout_s:.0f})."
    return StartFailed(f"no request was served within {timeout_s:.0f} s. {hint}")


async def _smoke_test(plan: LaunchPlan, split: bool, exit_watch: asyncio.Task[Child | None], console: Console) -> None:
    stopped = asyncio.Event()
    exit_watch.add_done_callback(lambda _: stopped.set())
    headers = {"authorization": f"Bearer {plan.own_key}"} if plan.own_key is not None else {}
    async with httpx2.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False, headers=headers) as client:
        with console.status(f"starting {len(plan.commands)} processes"):
            await smoke_request.wait_until_ready(client, plan.router_url, tuple(plan.worker_metrics), stopped)
        with console.status("sending a first request"):
            model = await smoke_request.model_served(client, plan.router_url)
            moved = await smoke_request.send_smoke_request(
                client, plan.router_url, model, plan.decode_metrics, must_move=split
            )
        chats = await smoke_request.takes_chats(client, plan.router_url, model)
        kernels = await smoke_request.kernels_in_use(client, plan.router_url)
    way = f"{moved} page bytes moved from prefill to decode" if moved else "decode computed its prompt itself"
    console.print(f"a first request was answered; {way}")
    print(_welcome(plan, model, chats=chats, kernels=kernels), flush=True)


def _welcome(plan: LaunchPlan, model: str, *, chats: bool, kernels: str) -> str:
    """The banner: what to open first, then what to read, and a first request that this model can answer."""
    url = plan.router_url
    metrics = {plan.router_metrics: "router", **plan.worker_metrics}
    width = max(map(len, metrics))
    return "\n".join(
        (
            "Baton is up.",
            *((f"page     {url}/",) if plan.page else ()),
            f"API      {url}/v1",
            *(f"metrics  {address:<{width}}  {name}" for address, name in metrics.items()),
            *((f"kernels  {kernels}",) if kernels else ()),
            "",
            _first_call(url, model, chats=chats, with_key=plan.own_key is not None),
            *((f"{_program()} chat --router {url}",) if chats else ()),
            "",
            "Ctrl-C stops everything.",
        )
    )


def _program() -> str:
    """How this program can be called again: `baton` if the shell would find it, else as it was called now."""
    called = sys.argv[0]
    found = shutil.which("baton")
    if Path(called).name != "baton" or (found is not None and Path(found).resolve() == Path(called).resolve()):
        return "baton"
    return shlex.quote(called)


def _first_call(url: str, model: str, *, chats: bool, with_key: bool) -> str:
    """A curl line; a model without a chat template gets no chat."""
    prompt = {"messages": [{"role": "user", "content": "Hello!"}]} if chats else {"prompt": "Once upon a time"}
    body = json.dumps({"model": model, **prompt, "stream": True})
    path = "chat/completions" if chats else "completions"
    key = ' -H "Authorization: Bearer $KEY"' if with_key else ""
    return f"curl -N {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"


async def _stop(supervisor: Supervisor, settings: UpSettings, console: Console) -> None:
    with console.status("stopping: router first, then decode, then prefill"):
        killed = await supervisor.stop(STOP_ORDER, settings.drain_timeout_s + _STOP_SLACK_S)
    if supervisor.was_killed:
        console.print("asked again to stop: what still ran was killed")
    elif killed:
        console.print(f"did not stop in time and were killed: {', '.join(killed)}")


@contextlib.asynccontextmanager
async def _task(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """`work` as a task that is cancelled at the end of the context. Its error is raised only to those who await it."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def _fork_server(plan: LaunchPlan, log_dir: Path) -> Iterator[ServiceForkServer | None]:
    """A fork server for the context, the early one if there is one; None where services cannot be forked."""
    if not can_fork():
        close_early()
        yield None
        return
    fork_server = ServiceForkServer(plan.commands, log_dir, take_early())
    try:
        fork_server.start()
        yield fork_server
    finally:
        fork_server.close()


@contextlib.contextmanager
def _redis(url: str | None, console: Console) -> Iterator[tuple[str, EmbeddedRedis | None]]:
    """The URL of the given Redis, checked; or that of a new one to start within the context, and the server itself.

    Raises `StoreUnavailable`.
    """
    if url is None:
        with embedded_redis() as redis:
            yield redis.url, redis
    else:
        with console.status("calling Redis"):
            asyncio.run(_check_redis(url))
        yield url, None


async def _check_redis(url: str) -> None:
    """Raises `StoreUnavailable` for a server that does not answer or that cannot hold our records."""
    store = await connect(url)
    await store.close()
    failed = [found for found in server_results(url, await read_facts(url)) if found.status is CheckStatus.FAIL]
    if failed:
        raise StoreUnavailable("; ".join(f"{found.name}: {found.found}. {found.fix}" for found in failed))


@contextlib.contextmanager
def _secret_file(given: Path | None) -> Iterator[Path]:
    """The given file, or a new one with mode 0600 that is removed with the context."""
    if given is not None:
        yield given
        return
    with tempfile.NamedTemporaryFile("w", prefix="baton-secret-") as file:  # made with mode 0600
        file.write(secrets.token_hex(SECRET_BYTES))
        file.flush()
        yield Path(file.name)


@contextlib.contextmanager
def _demo_socket(wanted: bool) -> Iterator[Path | None]:
    """The path of the demo's socket, in a folder that only this user may enter; None if it is not wanted."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="baton-demo-") as directory:  # made with mode 0700
        yield Path(directory) / "control"


@contextlib.contextmanager
def _core_lease_file(plan: CorePlan | None) -> Iterator[Path | None]:
    """A file for `plan` that is removed with the context; None without one."""
    if plan is None:
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="baton-cores-") as file:  # made with mode 0600
        file.write(plan.as_bytes())
        file.flush()
        yield Path(file.name)


@contextlib.contextmanager
def _log_dir(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="baton-logs-") as directory:
        yield Path(directory)
