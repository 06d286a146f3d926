"""A cluster of real processes with faulty connections: Redis, routers, prefill, decode and encode workers.

Every server stands behind proxies of `network`, unless the shape has none: workers announce their proxies' addresses,
and every process reaches Redis through its own proxy. Clients and checks connect directly. `recover` restarts dead
processes, as a supervisor would. One asyncio loop on the main thread. `matrix`, `soak` and `storm` are the callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from baton.domain.errors import BatonError
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole, WorkerStatus
from baton.services.cli.processes.local_redis import LocalRedis
from baton.services.cli.processes.ports import free_ports
from baton.store.connect import connect
from baton.store.store import StateStore
from chaos.clients.tenants import LoadTenant, write_files
from chaos.testbed.bit_flipper import PortKind
from chaos.testbed.budgets import set_prefill_tokens
from chaos.testbed.clocks import ClockController
from chaos.testbed.fork_server import ForkServer, shared_fork_server
from chaos.testbed.metrics import ProcessMetrics, parse_metrics
from chaos.testbed.network import ProxyNetwork
from chaos.testbed.process import ChildProcess, end_all, spawn

LOCALHOST = "127.0.0.1"
REDIS = "redis"
START_TIMEOUT_S = 180.0
SECRET_BYTES = 32
STOP_TIMEOUT_S = 20.0
ASK_INTERVAL_S = 0.03
SCRAPE_TIMEOUT_S = 10.0


class WaitTimeout(TimeoutError):
    """An expected state was not reached before its deadline."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Number and flags of each role. The defaults make every phase of a request long enough for a fault.

    `forks`: services are forks of a process that has imported everything. Their clocks cannot be moved. `new_ids`: a
    restarted worker has another id, as a new pod does; under its old one it waits until its last record has expired.
    `proxies`: servers stand behind proxies, all in this process; without them no link can be disturbed.
    `tenants`: of the keys that routers accept; clients without one of their own have the first. None: no keys.
    """

    num_prefill: int = 2
    num_decode: int = 2
    num_routers: int = 2
    num_encode: int = 0
    transport: str = "stream"
    model: str = "bundled"
    forks: bool = False
    new_ids: bool = False
    proxies: bool = True
    kv_memory_mib: int = 64
    tenants: tuple[LoadTenant, ...] = ()
    prefill_flags: Mapping[str, object] = field(
        default_factory=lambda: {"token-budget": 32, "max-partial-prompts": 1, "page-sharing": "always"}
    )
    decode_flags: Mapping[str, object] = field(default_factory=lambda: {"pull-deadline-s": 20})
    router_flags: Mapping[str, object] = field(
        default_factory=lambda: {"max-running-requests": 6, "request-deadline-s": 60, "max-attempts": 6}
    )

    @property
    def names(self) -> dict[str, str]:
        """ChildProcess name -> role, in starting order."""
        counts = {"encode": self.num_encode, "prefill": self.num_prefill, "decode": self.num_decode}
        counts["router"] = self.num_routers
        return {f"{role}-{n}": role for role, count in counts.items() for n in range(count)}


class ChaosCluster:
    """See the module. Use `running_cluster`."""

    def __init__(
        self, shape: ClusterShape, folder: Path, http: httpx2.AsyncClient, scraper: httpx2.AsyncClient
    ) -> None:
        """`http`: for the clients of the cluster. `scraper`: for its metrics, with kept connections."""
        self.shape = shape
        self.processes: dict[str, ChildProcess] = {}
        self._redis_address = (LOCALHOST, free_ports(1)[0])
        self._secret = secrets.token_bytes(SECRET_BYTES).hex().encode()
        self.clocks = ClockController(folder)
        self.redis = LocalRedis(tcp_port=self._redis_address[1], environment=self.clocks.environment(REDIS))
        self.network = ProxyNetwork(lambda: {p.name: p.pid for p in self.processes.values() if p.running})
        self.http = http
        self._scraper = scraper
        self.folder = folder
        self._killed_incarnations: set[Incarnation] = set()
        self._exit_reports: list[str] = []
        self._num_spawned = 0
        self._store: StateStore | None = None
        self._fork_server: ForkServer | None = None

    async def start(self) -> None:
        """Returns when every process is in service."""
        await asyncio.to_thread(self._write_secret)
        if self.shape.forks:
            self._fork_server = await asyncio.to_thread(shared_fork_server)
        await self.start_redis()
        for name in self.shape.names:
            await self._spawn(name)
        assert self.redis.tcp_url is not None
        self._store = await connect(self.redis.tcp_url, trust=ClusterTrust(self._secret))
        await self.wait_in_service(START_TIMEOUT_S)

    async def close(self) -> None:
        """Leaves nothing running but the fork server, which ends with this process."""
        self.network.heal()
        await asyncio.to_thread(end_all, list(self.processes.values()), STOP_TIMEOUT_S)
        if self._store is not None:
            await self._store.close()
        await self.network.close()
        self.redis.stop()

    @property
    def store(self) -> StateStore:
        """The state store, reached past the proxies."""
        assert self._store is not None
        return self._store

    def names(self, *roles: str) -> list[str]:
        """Processes of these roles, all without any."""
        return [name for name, role in self.shape.names.items() if not roles or role in roles]

    async def kill(self, name: str) -> bool:
        """SIGKILL; `redis` loses all data. False if the process had ended before."""
        if name == REDIS:
            await asyncio.to_thread(self.redis.kill)
            return True
        self._record_exits()
        with contextlib.suppress(BatonError):
            self._killed_incarnations |= {r.incarnation for r in await self.store.workers() if _name(r.id) == name}
        await asyncio.to_thread(self.processes[name].kill)
        return self.processes[name].popen.returncode == -signal.SIGKILL

    def drain(self, name: str) -> None:
        """SIGTERM: the process ends once its requests have. `recover` restarts it."""
        self.processes[name].may_leave()
        self.processes[name].popen.send_signal(signal.SIGTERM)

    def bad_exits(self, name: str) -> list[str]:
        """The exit code and the end of the log of a process that has ended by itself, unless the code is 0."""
        process = self.processes[name]
        if process.popen.returncode in (0, -signal.SIGKILL):
            return []
        return [f"{name} left with {process.popen.returncode}:\n{process.tail()}"]

    async def in_service(self, name: str) -> bool:
        """True if the present process has registered as a worker, or is a router that accepts requests.

        While the store or the router does not answer, it is not.
        """
        if self.shape.names[name] == "router":
            return await self._accepts(name)
        try:
            workers = await self.store.workers()
        except BatonError:
            return False
        living = [w for w in workers if w.incarnation not in self._killed_incarnations]
        return any(_name(w.id) == name and w.status is WorkerStatus.READY for w in living)

    async def _accepts(self, router: str) -> bool:
        try:
            answer = await self.http.get(f"{self.processes[router].url}/ready", timeout=SCRAPE_TIMEOUT_S)
        except httpx2.TransportError:
            return False
        return answer.status_code == httpx2.codes.OK

    async def set_prefill_tokens(self, name: str, num_tokens: int) -> None:
        """Changes a worker's budget of prompt tokens a step, 0 for none, until it restarts."""
        await set_prefill_tokens(self.store, ClusterTrust(self._secret), name, num_tokens)

    async def start_redis(self) -> None:
        """Restarts Redis empty at its old address; does nothing while it runs. Proxies must run meanwhile."""
        await asyncio.to_thread(self.redis.start)

    def start_intruder(self, name: str, id: str, model: str) -> ChildProcess:
        """Starts a prefill worker under `id` that is none of the cluster's, past the proxies. The caller ends it."""
        port, metrics_port, page_port = free_ports(3)
        flags: dict[str, object] = {"host": LOCALHOST, "port": port, "model": model, "redis-url": self.redis.tcp_url}
        flags |= {"cluster-secret-file": self._secret_file, "worker-id": id, "dtype": "float32"}
        flags |= {"transport": self.shape.transport, "kv-memory-mib": self.shape.kv_memory_mib}
        flags |= {"advertise-address": f"{LOCALHOST}:{port}", "metrics-port": metrics_port, "page-port": page_port}
        addresses = (LOCALHOST, port), (LOCALHOST, metrics_port)
        return spawn(name, "prefill", flags, addresses, self.folder, {}, self._fork_server)

    def resume_stopped(self) -> None:
        """Continues stopped processes."""
        for process in self.processes.values():
            if process.stopped:
                process.resume()

    async def recover(self) -> list[str]:
        """Ends every fault: restores links, continues stopped processes, restarts dead ones and returns their names."""
        self.network.heal()
        self.clocks.restore()
        await self.start_redis()
        self.resume_stopped()
        self._record_exits()
        dead = [process.name for process in self.processes.values() if not process.running]
        for name in dead:
            await self._spawn(name)
        return dead

    def dead_roles(self) -> set[str]:
        """Roles of which no process runs: until one is restarted, no request goes on."""
        running = {self.shape.names[name] for name, process in self.processes.items() if process.running}
        return set(self.shape.names.values()) - running

    def unexpected_exits(self) -> list[str]:
        """Exit codes and log ends of processes that ended since the last call without being killed."""
        self._record_exits()
        noted, self._exit_reports = self._exit_reports, []
        return noted

    def _record_exits(self) -> None:
        for process in self.processes.values():
            if process.was_ready and process.expected_running and not process.running:
                process.expected_running = False
                self._exit_reports.append(f"{process.name} ended with {process.popen.returncode}:\n{process.tail()}")

    async def metrics(self, name: str) -> ProcessMetrics | None:
        """A process's present metrics; None without an answer."""
        host, port = self.processes[name].metrics_address
        try:
            answer = await self._scraper.get(f"http://{host}:{port}/metrics")
        except httpx2.TransportError:
            return None
        return parse_metrics(answer.text)

    async def all_metrics(self, *roles: str) -> dict[str, ProcessMetrics]:
        """Metrics of all processes of these roles that answer."""
        names = self.names(*roles)
        answers = await asyncio.gather(*(self.metrics(name) for name in names))
        return {name: metrics for name, metrics in zip(names, answers, strict=True) if metrics is not None}

    async def wait_in_service(self, timeout_s: float) -> None:
        """Waits until every worker is registered by its present process, all links work, and every router reports them.

        A process that exits before it was in service (without an answer of Redis, say) is restarted.
        """
        await eventually(self._in_service, timeout_s, "every process is in service")
        for process in self.processes.values():
            process.was_ready = True

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until no worker holds a page and no router a request, by the metrics of every process."""

        async def idle() -> bool:
            metrics = await self.all_metrics()
            return len(metrics) == len(self.shape.names) and not any(
                g.busy_pages or g.open_requests for g in metrics.values()
            )

        try:
            await eventually(idle, timeout_s, "all pages are free and all requests have ended")
        except WaitTimeout as late:
            held = {n: (g.busy_pages, g.open_requests) for n, g in (await self.all_metrics()).items()}
            raise WaitTimeout(f"{late}; (busy pages, open requests): {held}") from None

    async def _in_service(self) -> bool:
        for process in [process for process in self.processes.values() if not process.running]:
            if process.was_ready:
                raise WaitTimeout(f"a process has ended: {self.unexpected_exits()}")
            await self._spawn(process.name)
        try:
            workers = await self.store.workers()
        except BatonError:
            return False
        if not self._all_linked(workers):
            return False
        return all([await self._is_ready(name) for name in self.names("router")])

    def _all_linked(self, workers: list[WorkerRecord]) -> bool:
        if self.shape.new_ids:
            workers = [w for w in workers if w.incarnation not in self._killed_incarnations]
        present = {
            _name(w.id)
            for w in workers
            if w.status is WorkerStatus.READY and w.incarnation not in self._killed_incarnations
        }
        prefills = {(w.id, w.incarnation) for w in workers if w.role is WorkerRole.PREFILL}
        links = [
            {(link.prefill_id, link.prefill_incarnation) for link in w.links}
            for w in workers
            if w.role is WorkerRole.DECODE
        ]
        return present == set(self.names("prefill", "decode", "encode")) and all(prefills <= each for each in links)

    async def _is_ready(self, router: str) -> bool:
        """True if a router reports all pairs, besides those of dead workers whose records have not expired."""
        try:
            answer = await self.http.get(f"{self.processes[router].url}/ready", timeout=SCRAPE_TIMEOUT_S)
        except httpx2.TransportError:
            return False
        num_pairs = self.shape.num_prefill * self.shape.num_decode
        linked = re.search(r"(\d+) linked", answer.text)
        if answer.status_code != httpx2.codes.OK or linked is None:
            return False
        return int(linked[1]) == num_pairs or (self.shape.new_ids and int(linked[1]) > num_pairs)

    def _write_secret(self) -> None:
        """All processes share a secret, so that calls are authenticated and Redis keeps nothing in clear."""
        self._secret_file.touch(0o600)
        self._secret_file.write_bytes(self._secret)

    @property
    def _secret_file(self) -> Path:
        return self.folder / "cluster.secret"

    async def _spawn(self, name: str) -> None:
        """Starts a process at new ports, since others may have taken the old ones; its proxy's address stays."""
        role = self.shape.names[name]
        port, metrics_port, page_port, session_port = free_ports(4)
        flags: dict[str, object] = {"host": LOCALHOST, "port": port, "model": self.shape.model}
        flags["redis-url"] = f"redis://{await self._reachable(REDIS, self._redis_address, client=name)}/0"
        flags["cluster-secret-file"] = self._secret_file
        if role == "router":
            flags |= {"router-id": name, "metrics-port": metrics_port, **self.shape.router_flags}
            flags |= write_files(self.shape.tenants, self.folder) if self.shape.tenants else {}
        else:
            advertised = await self._reachable(name, (LOCALHOST, port))
            self._num_spawned += 1
            id = f"{name}.{self._num_spawned}" if self.shape.new_ids else name
            flags |= {"worker-id": id, "advertise-address": advertised, "metrics-port": metrics_port}
            flags |= {"dtype": "float32", "transport": "stream"}  # of embeddings: phases see them in a proxy
            if role != "encode":
                flags |= {"kv-memory-mib": self.shape.kv_memory_mib, "transport": self.shape.transport}
                for kind, its_port in ((PortKind.PAGES, page_port), (PortKind.SESSIONS, session_port)):
                    advertised = await self._reachable(name, (LOCALHOST, its_port), kind=kind)
                    flags |= {f"{kind.value}-port": its_port, f"advertise-{kind.value}-address": advertised}
                flags |= self.shape.prefill_flags if role == "prefill" else self.shape.decode_flags
        addresses = (LOCALHOST, port), (LOCALHOST, metrics_port)
        environment = self.clocks.environment(name)
        self.processes[name] = spawn(name, role, flags, addresses, self.folder, environment, self._fork_server)

    async def _reachable(
        self, server: str, address: tuple[str, int], client: str = "", kind: PortKind = PortKind.CALLS
    ) -> str:
        """Where others reach a server, `host:port`: its proxy, or the server itself."""
        if self.shape.proxies:
            return await self.network.serve(server, address, client, kind)
        return "{}:{}".format(*address)


@contextlib.asynccontextmanager
async def running_cluster(shape: ClusterShape, folder: Path) -> AsyncIterator[ChaosCluster]:
    """Runs a cluster, yields it in service, and stops all of it. Logs go to `folder`."""
    limits = httpx2.Limits(max_connections=512, max_keepalive_connections=0)
    headers = shape.tenants[0].headers if shape.tenants else {}
    async with (
        httpx2.AsyncClient(timeout=60.0, trust_env=False, limits=limits, headers=headers) as http,
        httpx2.AsyncClient(timeout=SCRAPE_TIMEOUT_S, trust_env=False) as scraper,
    ):
        cluster = ChaosCluster(shape, folder, http, scraper)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.close()


def _name(id: WorkerId) -> str:
    """The process of a worker id."""
    return id.partition(".")[0]


async def eventually(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Polls until the (awaited) condition is true. Raises `WaitTimeout` after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        answer = condition()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return
        if loop.time() > deadline:
            raise WaitTimeout(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(ASK_INTERVAL_S)  # between two polls
