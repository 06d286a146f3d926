"""A cluster of real processes for tests: real Redis, workers, router and transfers.

Every process is `baton serve ...`, with imports done by `fork_server`. Waits have deadlines; an unexpected exit fails
the test and shows the log. `Cluster` is a context manager and leaves nothing running.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from baton.services.cli.processes.ports import free_ports
from chaos.testbed import fork_server
from tests.lateness import Late
from tests.redis_server import running_redis

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
EXIT_TIMEOUT_S = 3.0
PAGE_HOLD_TIMEOUT_S = 30.0
POLL_S = 0.02
NO_KEEPALIVE = httpx2.Limits(max_keepalive_connections=0)
PAGES = re.compile(r'^baton_kv_pages\{owner="(\w+)"\} (\S+)$', re.MULTILINE)
BUSY_OWNERS = ("pinned", "live", "reserved", "draining")


def eventually(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Polls `condition` and returns its first true value. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Late(f"not within {timeout_s} s: {what}")
        time.sleep(POLL_S)  # poll interval
    return value


@dataclass
class Process:
    """One `baton serve`."""

    name: str
    role: str
    port: int
    metrics_port: int
    flags: list[str]
    log: Path
    popen: fork_server.ForkedProcess
    expected_running: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self.expected_running = self.expected_running and number == signal.SIGCONT
        self.popen.send_signal(number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s` for the end."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


@dataclass
class Cluster:
    """`flags` go to both kinds of workers, `prefill_flags`, `decode_flags` and `router_flags` to one kind.

    `environment`: variables of all processes.
    """

    directory: Path
    model: str = "bundled"
    num_prefill: int = 1
    num_decode: int = 1
    num_routers: int = 1
    transport: str = "auto"
    flags: dict[str, Any] = field(default_factory=dict)
    prefill_flags: dict[str, Any] = field(default_factory=dict)
    decode_flags: dict[str, Any] = field(default_factory=dict)
    router_flags: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.redis = stack.enter_context(running_redis())
            self._scraper = stack.enter_context(plain_client(timeout=5.0, limits=NO_KEEPALIVE))
            stack.callback(self._stop_all)
            for i in range(self.num_prefill):
                self.start("prefill", f"prefill-{i}")
            for i in range(self.num_decode):
                self.start("decode", f"decode-{i}")
            for i in range(self.num_routers):
                self.start("router", f"router-{i}")
            self.client = stack.enter_context(plain_client(base_url=self.url, timeout=60.0))
            self.wait_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A process that refuses connections is perhaps about to end, and its log tells why.
        timeout_s = EXIT_TIMEOUT_S if isinstance(error, httpx2.TransportError) else 0.0
        dead = [p for p in self.processes.values() if p.expected_running and p.has_ended(timeout_s)]
        tails = "\n".join(f"--- {p.name} exited with {p.popen.returncode}\n{p.tail()}" for p in dead)
        self._stack.close()
        assert not dead, tails

    @property
    def url(self) -> str:
        return self.processes["router-0"].url

    def router_urls(self) -> list[str]:
        """URLs of all started routers, in service or not."""
        return [p.url for p in self.processes.values() if p.role == "router"]

    def start(self, role: str, name: str, flags: dict[str, Any] | None = None) -> Process:
        """Starts a process, perhaps again. `flags` are its own and override all others."""
        own = flags or {}
        port, metrics_port = free_ports(2)
        flags = {"host": "127.0.0.1", "port": port, "redis-url": self.redis.url, "model": self.model}
        if role == "router":
            flags |= {"router-id": name, "metrics-port": metrics_port, **self.router_flags}
        elif role == "encode":
            flags |= {"worker-id": name, "metrics-port": metrics_port, "dtype": "float32", "device": "cpu"}
            flags |= {"transport": self.transport}
        else:
            flags |= {"worker-id": name, "metrics-port": metrics_port, "transport": self.transport}
            flags |= {"dtype": "float32", "device": "cpu", "kv-memory-mib": 64, "idle-check-pages": 0}
            flags |= self.flags | (self.prefill_flags if role == "prefill" else self.decode_flags)
        arguments = [f"--{key}={value}" for key, value in (flags | own).items()]
        log = self.directory / f"{name}-{time.monotonic_ns()}.log"
        popen = self.spawn(name, ["serve", role, *arguments], log)
        self.processes[name] = Process(name, role, port, metrics_port, arguments, log, popen)
        return self.processes[name]

    def kill(self, name: str) -> Process:
        """Ends a process without warning."""
        process = self.processes[name]
        process.expected_running = False
        process.popen.kill()
        process.popen.wait(10.0)
        return process

    def spawn(self, name: str, words: list[str], log: Path) -> fork_server.ForkedProcess:
        """Runs `baton` with `words`; its output goes to `log`."""
        return fork_server.shared_fork_server().spawn(name, words, log, self.environment)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until every running router has a pair that moved pages."""
        eventually(self._ready, timeout_s, "the routers say ready")

    def wait_links(self, num_links: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until `num_links` links are up."""

        def count() -> bool:
            try:
                links = [self.metric(p.name, "baton_link_state") for p in self.workers("decode")]
            except httpx2.TransportError:  # a process without a metrics server yet
                return False
            return sum(links) == num_links

        eventually(count, timeout_s, f"{num_links} links")

    def workers(self, *roles: str) -> list[Process]:
        """Running processes of these roles; workers by default."""
        wanted = roles or ("prefill", "decode")
        return [p for p in self.processes.values() if p.role in wanted and p.popen.poll() is None]

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """Sums a metric's samples with these labels, in one process. Raises `httpx2.TransportError` without a reply."""
        lines = (line for line in self._metrics(name).split("\n") if line.startswith(metric))  # few: it is polled
        families = text_string_to_metric_families("\n".join([*lines, ""]))
        samples = [sample for family in families for sample in family.samples]
        return sum(s.value for s in samples if s.name == metric and labels.items() <= s.labels.items())

    def pages(self, name: str) -> dict[str, int]:
        """A worker's pages by owner; fast, for polling."""
        return {owner: int(float(count)) for owner, count in PAGES.findall(self._metrics(name))}

    def page_bytes(self, name: str) -> int:
        """Size of a page, from the worker's log."""
        found = re.search(r"page_bytes=(\d+)", self.processes[name].log.read_text(errors="replace"))
        assert found is not None, "the worker reports its pool"
        return int(found[1])

    def busy_pages(self) -> int:
        """Pages anywhere that are neither free nor cached."""
        return sum(self.pages(p.name)[owner] for p in self.workers() for owner in BUSY_OWNERS)

    def has_no_busy_pages(self, name: str) -> bool:
        """True if a worker has pages and all of them are free or cached."""
        pages = self.pages(name)
        return pages["free"] > 0 and not any(pages[owner] for owner in BUSY_OWNERS)

    def wait_pages_free(self, timeout_s: float) -> None:
        """Waits until no worker holds a page for a request."""
        eventually(lambda: self.busy_pages() == 0, timeout_s, "all pages free")

    def page_hold_time_s(self, since: float) -> float:
        """Seconds after `since` (`time.monotonic()`) at which the last poll that saw a held page began; 0 if the first
        poll saw none."""
        deadline, held_s = since + PAGE_HOLD_TIMEOUT_S, 0.0
        while (began := time.monotonic()) < deadline:
            if not self.busy_pages():
                return held_s
            held_s = began - since
        raise AssertionError(f"pages are held {PAGE_HOLD_TIMEOUT_S} s later")

    @property
    def bytes_moved(self) -> float:
        return sum(self.metric(p.name, "baton_transfer_bytes_total") for p in self.workers("decode"))

    @property
    def tokens_recomputed(self) -> float:
        return sum(self.metric(p.name, "baton_tokens_recomputed_total") for p in self.workers("decode"))

    def complete(self, prompt: Any, **parameters: Any) -> dict[str, Any]:
        """Sends POST /v1/completions, not streamed; returns the decoded answer."""
        body = {"model": self.model_name, "prompt": prompt, "temperature": 0, **parameters}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def wait_answer(self, prompt: Any, **parameters: Any) -> dict[str, Any]:
        """Sends a completion until one is answered, and returns the answer.

        After a restart a router may still say ready by what it knew of the process before, and then refuse a request
        until the new one has its links.
        """
        answers: list[dict[str, Any]] = []

        def is_answered() -> bool:
            body = {"model": self.model_name, "prompt": prompt, "temperature": 0, **parameters}
            response = self.client.post("/v1/completions", json=body)
            assert response.status_code in (200, 503), response.text
            if response.status_code == 200:
                answers.append(response.json())
            return bool(answers)

        eventually(is_answered, START_TIMEOUT_S, "a completion is answered")
        return answers[0]

    @property
    def model_name(self) -> str:
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    def _metrics(self, name: str) -> str:
        process = self.processes[name]
        return self._scraper.get(f"http://127.0.0.1:{process.metrics_port}/metrics").text

    def _ready(self) -> bool:
        for process in self.processes.values():
            if process.expected_running and process.popen.poll() is not None:
                raise AssertionError(f"{process.name} exited with {process.popen.returncode}\n{process.tail()}")
        return all(is_ready(router, self._scraper) for router in self.workers("router"))

    def _stop_all(self) -> None:
        living = [p for p in self.processes.values() if p.popen.poll() is None]
        for process in living:
            process.popen.send_signal(signal.SIGCONT)
            process.popen.terminate()
        for process in living:
            try:
                process.popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait(5.0)


def plain_client(**options: Any) -> httpx2.Client:
    """A client for plain HTTP. A client that verifies certificates takes 40 ms to read the machine's."""
    return httpx2.Client(trust_env=False, verify=False, **options)


def is_ready(router: Process, client: httpx2.Client | None = None) -> bool:
    """True if the router reports ready. Asks by `client`, or by one of its own."""
    try:
        with contextlib.nullcontext(client) if client else plain_client(timeout=5.0) as asking:
            return bool(asking.get(f"{router.url}/ready").status_code == 200)
    except httpx2.TransportError:
        return False


def completion_tokens(answer: dict[str, Any], index: int = 0) -> list[int]:
    """Token ids of a completion with `return_token_ids`."""
    return [int(token) for token in answer["choices"][index]["token_ids"]]


def links_in(log: str) -> Iterator[str]:
    """The transports that a decode worker's log reports at link-up."""
    for line in log.splitlines():
        if "link_up" in line and (found := re.search(r"transport=(\w+)", line)):
            yield found[1]
