"""Planted bugs in what lends idle workers' cores; a part of the table in `bugs`. Some are in the native kernels."""

from __future__ import annotations

from tests.planted.runner import PlantedBug as bug

CORES = "lent cores"
PLAN = "baton/settings/core_plan.py"
PLAN_TESTS = "tests/unit/settings/test_core_plan.py"
LEASE = "baton/model/kernels/src/core_lease.cpp"
POOL = "baton/model/kernels/src/thread_pool.cpp"
LEASE_TESTS = "tests/unit/model/kernels/test_core_lease.py"

CORE_BUGS = (
    bug(
        CORES, "cores of a worker that starts are lent", PLAN,
        "_COMPUTING = 2**63 - 1", "_COMPUTING = 0",
        f"{PLAN_TESTS} {LEASE_TESTS}",
    ),
    bug(
        CORES, "a core of several owners is lent when the last of them is idle", PLAN,
        "owners[core] = owners.get(core, 0) | 1 << slot", "owners[core] = 1 << slot",
        PLAN_TESTS,
    ),
    bug(
        CORES, "a worker borrows its own cores", PLAN,
        "if core not in self.cores[worker]}", "}",
        PLAN_TESTS,
    ),
    bug(
        CORES, "a worker that computes does not say so", LEASE,
        "    num_calls++;\n    own->last_call_ns.store(kComputing, std::memory_order_relaxed);", "    num_calls++;",
        LEASE_TESTS,
    ),
    bug(
        CORES, "a worker that has computed keeps its cores", LEASE,
        "--num_calls > 0) return;\n    own->last_call_ns.store(now_ns(), std::memory_order_relaxed);",
        "--num_calls > 0) return;",
        LEASE_TESTS,
    ),
    bug(
        CORES, "a worker that leaves goes on lending", LEASE,
        "if (own != nullptr) own->last_call_ns.store(kComputing, std::memory_order_relaxed);\n}\n", "}\n",
        LEASE_TESTS,
    ),
    bug(
        CORES, "only the first of several owners is asked", LEASE,
        "for (; owners != 0; owners &= owners - 1) {", "for (; owners != 0; owners = 0) {",
        LEASE_TESTS,
    ),
    bug(
        CORES, "a borrowed core is kept to the end of a call", POOL,
        "while (lease_is_idle(owners)) {", "while (true) {",
        LEASE_TESTS,
    ),
)  # fmt: skip
