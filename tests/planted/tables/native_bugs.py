"""Planted bugs in what lends idle workers' cores, and in layers of one native call; parts of the table in `bugs`."""

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
        "while (lease_is_idle(worker.owners)) {", "while (true) {",
        LEASE_TESTS,
    ),
    bug(
        CORES, "a busy core is borrowed again at once", POOL,
        "paid + kTimePerWait * lacked", "paid",
        LEASE_TESTS,
    ),
    bug(
        CORES, "a short lack costs the next calls", POOL,
        "clock_ns(CLOCK_MONOTONIC) + kDebtNs >=", "clock_ns(CLOCK_MONOTONIC) >=",
        LEASE_TESTS,
    ),
    bug(
        CORES, "a thread that lost a borrowed core is waited for there", POOL,
        "            worker.move_to(core);\n", "",
        LEASE_TESTS,
    ),
    bug(
        CORES, "a thread stays on the core of its caller", POOL,
        "if (moved.exchange(false)) bind_to(core);", "moved = false;",
        LEASE_TESTS,
    ),
)  # fmt: skip

LAYERS = "layers in one call"
LEAN, NATIVE_LAYERS = "baton/model/decoders/lean.py", "baton/model/decoders/native_layers.py"
LAYER_TESTS = "tests/unit/model/decoders/test_native_layers.py"

LAYER_BUGS = (
    bug(
        LAYERS, "tokens of an image rotate by one axis", LEAN,
        "not deep and ropes is self._ropes else None", "not deep else None",
        LAYER_TESTS,
    ),
    bug(
        LAYERS, "deep rows of an image are left out", LEAN,
        "capture is None and not deep and", "capture is None and",
        f"{LAYER_TESTS} tests/unit/model/vision/test_vision_loading.py",
    ),
    bug(
        LAYERS, "a tree is computed in layers with a window", NATIVE_LAYERS,
        "same and not (plan.has_trees and self._has_window)", "same",
        LAYER_TESTS,
    ),
    bug(
        LAYERS, "segments of torch are left out", "baton/model/attention/native_backend.py",
        "return None if self._torch_segments else self._plan", "return self._plan",
        LAYER_TESTS,
    ),
    bug(
        LAYERS, "panels of another dtype are read", NATIVE_LAYERS,
        "panels is None or panels.dtype is not dtype", "panels is None",
        LAYER_TESTS,
    ),
    bug(
        LAYERS, "panels that were replaced are read", NATIVE_LAYERS,
        "return all(matrix.linear.panels is matrix.panels for matrix in self._matrices)", "return True",
        LAYER_TESTS,
    ),
    bug(
        LAYERS, "window slots are read as pages", NATIVE_LAYERS,
        "if storage.has_window_slots:", "if False:",
        LAYER_TESTS,
    ),
)  # fmt: skip

SOFTMAX_SOURCE = "baton/model/kernels/src/online_softmax.h"
SOFTMAX_TESTS = "tests/unit/model/attention/test_online_softmax.py"

SOFTMAX_BUGS = (
    bug(
        LAYERS, "a new maximum leaves the sums as they were", SOFTMAX_SOURCE,
        "store(sums + i, load(sums + i) * factor)", "store(sums + i, load(sums + i))",
        SOFTMAX_TESTS,
    ),
    bug(
        LAYERS, "a new maximum leaves the sum of weights as it was", SOFTMAX_SOURCE,
        "store(row_sum, load(row_sum) * factor);", "",
        SOFTMAX_TESTS,
    ),
    bug(
        LAYERS, "the maximum never follows", SOFTMAX_SOURCE,
        "kMaxExponent = 8.0f", "kMaxExponent = 1000.0f",
        SOFTMAX_TESTS,
    ),
)  # fmt: skip
