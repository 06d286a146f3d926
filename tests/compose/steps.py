"""The steps of `make test-compose`, in order: each raises `AssertionError` or `TimeoutError` for a broken promise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2

from tests.cluster import plain_client
from tests.compose import drawing, overlays, proxying
from tests.compose.alerts import Alerts
from tests.compose.engine import ComposeProject
from tests.compose.load import ExactLoad, Expected
from tests.compose.waiting import wait_until

LINK_TIMEOUT_S = 600.0
CALLS_TIMEOUT_S = 600.0
SCRAPE_TIMEOUT_S = 120.0
SAME_ANSWERS = 6
"""In a row, before `/ready` is believed: the proxy asks the routers in turn."""
SPANS = ("baton-router request", "baton-prefill prefill", "baton-decode transfer", "baton-decode decode")
_MOVED = re.compile(r"^baton_transfer_bytes_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass
class ComposeTest:
    """The project, its addresses and what its answers should be."""

    project: ComposeProject
    url: str
    collector_url: str
    expected: Sequence[Expected]
    build: bool = True
    notes: list[str] = field(default_factory=list)
    """What a step has measured; the report shows it."""
    alerts: Alerts = field(default_factory=Alerts)
    grafana_url: str = ""

    def up(self) -> None:
        """Everything starts and is healthy; two workers of each kind make four pairs."""
        self.project.up(build=self.build)
        self.wait_pairs()

    def contained(self) -> None:
        """No container runs as root, can write to its root or has a capability."""
        for name in self.project.containers():
            found = self.project.inspect(name)
            assert found["HostConfig"]["ReadonlyRootfs"], f"{name} can write to its root"
            assert found["HostConfig"]["CapDrop"] == ["ALL"], name
            assert found["State"].get("Health", {"Status": "healthy"})["Status"] == "healthy", name
        for service in ("router", "prefill", "decode", "encode"):
            for name in self.project.containers(service):
                assert self.project.docker("exec", name, "id", "-u").strip() == "10001", name

    def exact(self) -> None:
        """Every prompt's tokens through HTTP are the model's own."""
        load = ExactLoad(self.url, self.expected, num_clients=1)
        with load.running():
            load.wait_for_calls(CALLS_TIMEOUT_S, each=len(self.expected))
        self.judge(load)

    def bytes_moved(self) -> None:
        """Decode workers have pulled pages."""
        moved = sum(
            float(value)
            for name in self.project.containers("decode")
            for value in _MOVED.findall(self.project.metrics(name, 9102))
        )
        self.notes.append(f"{moved:.0f} bytes")
        assert moved > 0

    def spans(self) -> None:
        """Spans of router, prefill and decode arrive in the collector."""

        def arrived() -> bool:
            with plain_client(timeout=5.0) as client:
                counts = client.get(self.collector_url).json()
            return all(counts.get(name, 0) > 0 for name in SPANS)

        wait_until(arrived, 60.0, f"spans named {SPANS}")

    def scale(self) -> None:
        """`--scale decode=3` adds a worker that links, and evicts none; each is named as its container."""
        before = self.project.containers("decode")
        self.project.scales["decode"] = 3
        self.project.up()
        self.wait_pairs()
        assert set(before) < set(self.project.containers("decode"))
        assert (ids := self.worker_ids("decode")) == ["decode-1", "decode-2", "decode-3"], ids

    def drained(self) -> None:
        """`--scale decode=2` drains the third worker under load: no call fails, and no alert fires."""
        with self.load() as load:
            self.project.scales["decode"] = 2
            self.project.up()
            self.wait_pairs()
            load.wait_for_calls(CALLS_TIMEOUT_S)
            self.alerts.stay_silent()
        self.judge(load)

    def killed(self) -> None:
        """One decode worker of two is killed under load: no call fails, every token is right, an alert fires."""
        victim = self.project.containers("decode")[0]
        with self.load() as load:
            self.project.docker("kill", victim)
            self.wait_noticed(load, "decode")
            self.alerts.wait_for("BatonWorkerLost")
            self.project.docker("start", victim)
            self.wait_pairs()
        self.judge(load)

    def paused(self) -> None:
        """A decode worker stops without a word under load, and goes on later."""
        victim = self.project.containers("decode")[-1]
        with self.load() as load:
            self.project.docker("pause", victim)
            self.wait_noticed(load, "decode")
            self.project.docker("unpause", victim)
            self.wait_pairs()
        self.judge(load)

    def disconnected(self) -> None:
        """A prefill worker loses its network under load, and gets it back."""
        victim, network = self.project.containers("prefill")[0], f"{self.project.name}_default"
        with self.load() as load:
            self.project.docker("network", "disconnect", network, victim)
            self.wait_noticed(load, "prefill")
            self.project.docker("network", "connect", "--alias", "prefill", network, victim)
            self.wait_pairs()
        self.judge(load)

    def rolling_restart(self) -> None:
        """Every decode worker, prefill worker and router restarts, one after the other, under load.

        No call is refused, and no stream is cut: clients that cannot resume do not notice either.
        """
        with self.load() as load:
            for service in ("decode", "prefill", "router"):
                for name in self.project.containers(service):
                    self.project.restart(name)
                    if service == "router":
                        self.wait_router(name)
                    self.wait_pairs()
            load.wait_for_calls(CALLS_TIMEOUT_S)
        self.judge(load)
        assert (load.num_resumes, load.num_refused) == (0, 0), "clients were refused or cut off"

    def down(self) -> None:
        """Nothing is left: no container, network or volume."""
        self.project.down()
        left = self.project.leftovers()
        assert left == [], f"left behind: {', '.join(left)}"

    def scraped(self, service: str) -> None:
        """Prometheus has found and scraped every container of `service`."""
        wait_until(lambda: self.alerts.value(f'min(up{{job="{service}"}})') == 1, SCRAPE_TIMEOUT_S, f"{service} is up")

    @property
    def workers(self) -> dict[str, int]:
        """service -> how many workers of it there should be."""
        return {"prefill": 2, "decode": 2, **self.project.scales}

    def load(self) -> RunningLoad:
        """A load whose clients have all ended a call when its context begins."""
        return RunningLoad(ExactLoad(self.url, self.expected))

    def judge(self, load: ExactLoad) -> None:
        """Fails if any client saw an error or a wrong token."""
        self.notes.append(f"{load.num_right} calls right, {load.num_resumes} resumed, {load.num_refused} refused")
        assert load.problems == [], load.problems[0]
        assert load.num_right > 0

    def wait_noticed(self, load: ExactLoad, service: str) -> None:
        """Waits until clients have begun and ended calls under the fault, and routers miss a worker of `service`."""
        load.wait_for_calls(CALLS_TIMEOUT_S)
        numbers = {name: self.workers[name] - (name == service) for name in ("prefill", "decode")}
        self.wait_pairs(numbers["prefill"] * numbers["decode"])

    def wait_router(self, container: str) -> None:
        """Waits until the proxy sends requests to this router: until then the other one must not be stopped."""
        name = f"router-{self.project.inspect(container)['Config']['Hostname']}"

        def asked() -> bool:
            with plain_client(timeout=5.0) as client:
                answers = [client.get(f"{self.url}/v1/cluster") for _ in range(SAME_ANSWERS)]
            return name in {answer.json()["router"] for answer in answers if answer.status_code == 200}

        wait_until(asked, LINK_TIMEOUT_S, f"the proxy asks {name}")

    def worker_ids(self, role: str) -> list[str]:
        """Ids of this kind of workers, sorted, as the page shows them."""
        with plain_client(timeout=30.0) as client:
            workers = client.get(f"{self.url}/v1/cluster").json()["workers"]
        return sorted(each["id"] for each in workers if each["role"] == role)

    def wait_pairs(self, wanted: int | None = None) -> None:
        """Waits until all routers see this many linked pairs: by default those of all workers."""
        number = self.workers["prefill"] * self.workers["decode"] if wanted is None else wanted
        wait_until(lambda: self._pairs() == {number}, LINK_TIMEOUT_S, f"{number} linked pairs")

    def _pairs(self) -> set[int]:
        """The numbers that the routers give, -1 for one that is not ready."""
        with plain_client(timeout=5.0) as client:
            return {linked_pairs(client.get(f"{self.url}/ready")) for _ in range(SAME_ANSWERS)}


class RunningLoad:
    """Context manager of an `ExactLoad` under way."""

    def __init__(self, load: ExactLoad) -> None:
        self._load = load
        self._running = load.running()

    def __enter__(self) -> ExactLoad:
        self._running.__enter__()
        try:
            self._load.wait_for_calls(CALLS_TIMEOUT_S, each=1)
        except BaseException as error:
            self._running.__exit__(type(error), error, error.__traceback__)
            raise
        return self._load

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(*error)  # type: ignore[arg-type]


STEPS: Mapping[str, Callable[[ComposeTest], None]] = {
    "merge": overlays.merge,
    "up": ComposeTest.up,
    "contained": ComposeTest.contained,
    "exact": ComposeTest.exact,
    "bytes": ComposeTest.bytes_moved,
    "spans": ComposeTest.spans,
    "grafana": drawing.grafana,
    "proxy": proxying.proxy,
    "scale": ComposeTest.scale,
    "drain": ComposeTest.drained,
    "kill": ComposeTest.killed,
    "pause": ComposeTest.paused,
    "disconnect": ComposeTest.disconnected,
    "restart": ComposeTest.rolling_restart,
    "images": overlays.images,
    "secret": overlays.secret,
    "cma": overlays.cma,
    "down": ComposeTest.down,
}


def linked_pairs(answer: httpx2.Response) -> int:
    """The number in a router's answer to `/ready`; -1 if it is not ready."""
    if answer.status_code != 200:
        return -1
    found = re.match(r"(\d+) linked", str(json.loads(answer.text).get("detail")))
    return int(found[1]) if found else -1
