"""Planted bugs of page connections, their readers and the label of their links, and of early starts and stops."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

CONNECTIONS, ENDS = "page connections", "workers and routers that end"
STREAM, TESTS = "baton/transfer/stream", "tests/unit/transfer/hostile tests/unit/transfer/test_page_connections.py"
LABELS = "tests/unit/worker/handoff/test_link_series.py"
EARLY, RESERVE = "tests/service/dispatch/prefill", "services/router/dispatch/reserve.py"
OWNERSHIP, CLAIMS = "baton/store/ownership.py", "tests/unit/store/test_ownership.py"

PAGE_CONNECTION_BUGS = (
    PlantedBug(
        CONNECTIONS, "strangers keep their places", f"{STREAM}/page_server.py",
        "if len(self._strangers) >= MAX_STRANGERS:", "if False:", TESTS,
    ),
    PlantedBug(
        CONNECTIONS, "a reader stays a stranger", f"{STREAM}/page_server.py",
        "        with self._lock:\n            self._strangers.pop(connection, None)\n        memory",
        "        memory", TESTS,
    ),
    PlantedBug(
        CONNECTIONS, "bytes that nobody asked for begin an answer", f"{STREAM}/page_wire.py",
        "    connection.setblocking(False)\n", "    return True\n", TESTS,
    ),
    PlantedBug(
        CONNECTIONS, "a resolver has all the time", f"{STREAM}/host_lookup.py",
        "return self._start().result(timeout_s)", "return self._find(0)", TESTS,
    ),
    PlantedBug(
        CONNECTIONS, "a captured request is served again", f"{STREAM}/page_server.py",
        "if isinstance(token, CallTokenFault):", "if isinstance(token, str):", TESTS,
    ),
    PlantedBug(
        CONNECTIONS, "a link is named by its port", f"{STREAM}/mover.py",
        "self._paths[source] = landed.path", "self._paths[source] = PAGES_PATH", TESTS,
    ),
    PlantedBug(
        CONNECTIONS, "a link keeps its first label", "baton/worker/handoff/links.py",
        "if path != link.path:", "if False:", LABELS,
    ),
    PlantedBug(
        ENDS, "orphans are claimed after the stop", "services/router/app.py",
        "running.ownership.stop_claiming()  # others", "pass  # others", "tests/unit/router/test_app.py",
    ),
    PlantedBug(
        ENDS, "a lost answer to a claim waits for the end of the drain", OWNERSHIP,
        "            if self._is_patient:\n", "            if self.may_claim:\n", CLAIMS,
    ),
    PlantedBug(
        ENDS, "prefill that failed beside decode is forgotten", RESERVE,
        "error.early = search.prefill.failure", "pass", EARLY,
    ),
    PlantedBug(
        ENDS, "an answered decode worker still owes", "services/router/dispatch/prefill/early_start.py",
        "asked.pop(id, None)", "pass", "tests/unit/router/dispatch/test_early_start.py",
    ),
    PlantedBug(
        ENDS, "prompts begin for a decode worker that hangs", "services/router/dispatch/prefill/early_start.py",
        "and now - asked_at <= MAX_SILENCE_S", "and True", f"{EARLY} tests/unit/router/dispatch/test_early_start.py",
    ),
)  # fmt: skip
