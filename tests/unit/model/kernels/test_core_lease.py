"""Idle workers lend their cores: to whom, when, and that no bit depends on it."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from baton.model.kernels.core_lease import CoreLease, join_core_lease
from baton.model.kernels.library import Kernels, load_kernels
from baton.model.linears.panels import PanelLinear
from baton.settings.core_plan import SLOT_BYTES, SLOTS_BYTES, BadCorePlan, CorePlan
from tests.kernels import kernel_levels
from tests.unit.model.kernels.test_threads import works

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built"),
    pytest.mark.skipif(len(CORES) < 2, reason="there is one core"),
]

COMPUTING = 2**63 - 1
OWN, OTHER, THIRD = 0, 1, 2
TIMEOUT_S = 100.0


class LeaseFile:
    """The file of two workers, `own` and `other`; the test plays `other`. A third one may share its core."""

    def __init__(self, path: Path, *, third: bool = False) -> None:
        self.path = path
        cores = {"own": (CORES[0],), "other": (CORES[1],), **({"third": (CORES[1],)} if third else {})}
        path.write_bytes(CorePlan(cores).as_bytes())

    def last_call_ns(self, slot: int) -> int:
        with self.path.open("rb") as file:
            return int(struct.unpack("q", os.pread(file.fileno(), 8, slot * SLOT_BYTES))[0])

    def set(self, slot: int, last_call_ns: int) -> None:
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("q", last_call_ns), slot * SLOT_BYTES)

    def set_other(self, last_call_ns: int) -> None:
        self.set(OTHER, last_call_ns)


@pytest.fixture
def lease_file(tmp_path: Path) -> LeaseFile:
    return LeaseFile(tmp_path / "cores")


@pytest.fixture
def kernels() -> Kernels:
    return load_kernels(kernel_levels()[-1])


@pytest.fixture
def lease(lease_file: LeaseFile, kernels: Kernels) -> Iterator[CoreLease]:
    lease = join_core_lease(lease_file.path, "own", kernels)
    yield lease
    lease.leave()


def product(kernels: Kernels) -> tuple[PanelLinear, torch.Tensor]:
    """Some milliseconds of work, in many tasks."""
    return PanelLinear(kernels, torch.randn(2048, 512), None), torch.randn(256, 512)


def borrows_within(seconds: float, lease: CoreLease, kernels: Kernels) -> bool:
    """Computes until some of it ran on the other's core. The thread there may be late."""
    linear, x = product(kernels)
    before, deadline = lease.borrowed_s(), time.monotonic() + seconds
    while lease.borrowed_s() == before and time.monotonic() < deadline:
        linear(x)
    return lease.borrowed_s() > before


def computes_on_its_own(lease: CoreLease, kernels: Kernels) -> bool:
    linear, x = product(kernels)
    linear(x)  # what a borrowed thread had at hand is over with its call
    before = lease.borrowed_s()
    for _ in range(50):
        linear(x)
    return lease.borrowed_s() == before


def borrower_of() -> int:
    """The thread of this process that is bound to the other's core."""
    found = []
    for name in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # one of another test has just ended
            if os.sched_getaffinity(int(name)) == {CORES[1]}:
                found.append(int(name))
    (borrower,) = found
    return borrower


def look_again() -> None:
    """Waits between two looks: a thread that spins instead has its next turn late on a busy machine."""
    threading.Event().wait(0.001)


@contextmanager
def busy_core() -> Iterator[None]:
    """Two programs without a slot compute on the other's core, in sessions of their own."""
    code = f"import os; os.sched_setaffinity(0, {{{CORES[1]}}}); print('up', flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", code]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(2)]
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == b"up\n"
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_a_core_is_borrowed_while_its_owner_is_idle(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    assert lease.borrowable == (CORES[1],)
    assert computes_on_its_own(lease, kernels), "the other worker has not joined yet"
    lease_file.set_other(time.monotonic_ns() - 10**9)
    assert borrows_within(TIMEOUT_S, lease, kernels)
    lease_file.set_other(COMPUTING)
    assert computes_on_its_own(lease, kernels)


def test_a_core_goes_back_in_the_middle_of_a_call(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    """On a busy machine any thread may be held up, so calls with and without an owner that comes back take turns."""
    linear, x = PanelLinear(kernels, torch.randn(16384, 2048), None), torch.randn(256, 2048)  # one call of the pool
    borrower = borrower_of()

    def computed_ns(thread: int) -> int:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])

    def borrowed_s(*, comes_back: bool) -> float:
        lease_file.set_other(0)
        before, computed_before = lease.borrowed_s(), computed_ns(borrower)
        caller = threading.Thread(target=linear, args=(x,))
        caller.start()
        while comes_back and caller.is_alive():
            if computed_ns(borrower) > computed_before + 10**6:
                lease_file.set_other(COMPUTING)
                break
            look_again()
        caller.join()
        return lease.borrowed_s() - before

    deadline, stays, gone, rounds = time.monotonic() + TIMEOUT_S, 0.0, 0.0, 0
    while rounds < 5 or stays < 0.1 or gone > stays / 2:
        assert time.monotonic() < deadline, (stays, gone, rounds)
        stays += borrowed_s(comes_back=False)
        gone += borrowed_s(comes_back=True)
        rounds += 1


def test_a_core_that_others_use_is_left_alone_for_most_of_the_time(
    lease: CoreLease, lease_file: LeaseFile, kernels: Kernels
):
    """Eight times each lack passes before the next part of a call, but for 16 ms; the last pause may go on."""
    linear, x = PanelLinear(kernels, torch.randn(4096, 2048), None), torch.randn(256, 2048)
    lease_file.set_other(0)
    with busy_core():
        began, before, waits = time.monotonic(), lease.wait_s(), [0.0]
        while waits[-1] < 0.1 or len(waits) < 10:
            assert time.monotonic() - began < TIMEOUT_S, waits
            linear(x)
            if (waited := lease.wait_s() - before) > waits[-1]:
                waits.append(waited)
        each = [after - before for before, after in itertools.pairwise(waits)]
        assert sum(min(8 * wait, 1.9) for wait in each[:-1]) < time.monotonic() - began + 0.016


def test_a_short_lack_costs_no_pause(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    """A timer tick is one. Only calls count that are over before eight times the lack of the call before has passed."""
    linear, x = PanelLinear(kernels, torch.randn(1024, 512), None), torch.randn(64, 512)
    lease_file.set_other(0)

    def call() -> tuple[float, float, float, float]:
        """Computes: when it began and ended, what it lacked, what it borrowed."""
        waited, borrowed, began = lease.wait_s(), lease.borrowed_s(), time.monotonic()
        linear(x)
        ended = time.monotonic()
        return began, ended, lease.wait_s() - waited, lease.borrowed_s() - borrowed

    paid, num_seen, num_borrowed, deadline = 0.0, 0, 0, time.monotonic() + 2 * TIMEOUT_S
    while num_borrowed < 5:
        assert time.monotonic() < deadline, (num_seen, num_borrowed)
        began, ended, lacked, borrowed = call()
        if ended < paid < began + 0.008:  # half of what may be owed without a pause
            num_seen += 1
            num_borrowed += borrowed > 0
        assert num_borrowed or num_seen < 200
        paid = max(paid, began) + 8 * lacked


def test_a_thread_that_lost_a_borrowed_core_gets_its_callers(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    linear, x = PanelLinear(kernels, torch.randn(4096, 2048), None), torch.randn(1024, 2048)  # tasks of some 20 ms
    wanted, borrower, done = linear(x), borrower_of(), threading.Event()
    same: list[bool] = []

    def call() -> None:
        os.sched_setaffinity(0, {CORES[0]})
        while not done.is_set():
            same.append(torch.equal(linear(x), wanted))

    def seen_on(core: int) -> bool:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if os.sched_getaffinity(borrower) == {core}:
                return True
            look_again()
        return False

    lease_file.set_other(0)
    caller = threading.Thread(target=call)
    with busy_core():
        caller.start()
        try:
            on_callers = seen_on(CORES[0])
        finally:
            done.set()
            caller.join()
    assert on_callers
    assert all(same)
    assert seen_on(CORES[1]), "it goes back once its task is done"


def test_a_core_of_two_owners_is_borrowed_while_both_are_idle(tmp_path: Path, kernels: Kernels):
    shared = LeaseFile(tmp_path / "cores", third=True)
    lease = join_core_lease(shared.path, "own", kernels)
    try:
        for busy, idle in ((OTHER, THIRD), (THIRD, OTHER)):
            shared.set(idle, 0)
            shared.set(busy, COMPUTING)
            assert computes_on_its_own(lease, kernels)
        shared.set(THIRD, 0)
        assert borrows_within(TIMEOUT_S, lease, kernels)
    finally:
        lease.leave()


def test_a_core_stays_with_its_owner_between_two_kernels(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    lease_file.set_other(time.monotonic_ns() + 10**12)  # a call that is not over for two milliseconds, for long
    assert computes_on_its_own(lease, kernels)


def test_a_worker_shows_that_it_computes_and_when_it_did(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    before = time.monotonic_ns()
    linear, x = product(kernels)
    seen: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while COMPUTING not in seen and not done.is_set():
            seen.add(lease_file.last_call_ns(OWN))

    watcher = threading.Thread(target=watch)
    watcher.start()
    deadline = time.monotonic() + TIMEOUT_S
    while watcher.is_alive() and time.monotonic() < deadline:
        linear(x)  # lets other threads of the interpreter run
    done.set()
    watcher.join()
    assert COMPUTING in seen
    assert before < lease_file.last_call_ns(OWN) <= time.monotonic_ns()


def test_a_worker_that_leaves_keeps_its_cores_and_takes_no_others(lease_file: LeaseFile, kernels: Kernels):
    lease = join_core_lease(lease_file.path, "own", kernels)
    lease_file.set_other(0)
    assert borrows_within(TIMEOUT_S, lease, kernels)
    lease.leave()
    assert lease_file.last_call_ns(OWN) == COMPUTING
    assert computes_on_its_own(lease, kernels)
    assert lease_file.last_call_ns(OWN) == COMPUTING


@contextmanager
def flipping(lease_file: LeaseFile) -> Iterator[None]:
    """The other worker begins and ends calls all the time."""
    done = threading.Event()

    def flip() -> None:
        while not done.is_set():
            lease_file.set_other(0)
            lease_file.set_other(COMPUTING)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_bits_do_not_depend_on_cores_that_come_and_go(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    calls = works(kernels)
    lease_file.set_other(COMPUTING)
    wanted = {name: call() for name, call in calls.items()}
    with flipping(lease_file):
        for _ in range(100):
            for name, call in calls.items():
                assert torch.equal(call(), wanted[name]), name


def test_own_threads_and_borrowed_ones_share_calls(lease: CoreLease, lease_file: LeaseFile, kernels: Kernels):
    wanted = {name: call() for name, call in works(kernels).items()}
    kernels.set_threads(3)
    try:
        lease_file.set_other(0)
        assert borrows_within(TIMEOUT_S, lease, kernels)
        assert all(torch.equal(call(), wanted[name]) for name, call in works(kernels).items())
    finally:
        kernels.set_threads(1)


def test_cores_that_this_process_may_not_use_are_not_borrowed(tmp_path: Path, kernels: Kernels):
    path = tmp_path / "cores"
    path.write_bytes(CorePlan({"own": (CORES[0],), "other": (1000, 100_000)}).as_bytes())
    lease = join_core_lease(path, "own", kernels)
    lease.leave()
    assert lease.borrowable == ()


@pytest.mark.parametrize("content", [b"", b"\0" * SLOTS_BYTES, b"\0" * SLOTS_BYTES + b'{"cores": 3}', b"x" * 9000])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, kernels: Kernels, content: bytes):
    path = tmp_path / "cores"
    path.write_bytes(content)
    with pytest.raises(BadCorePlan, match="not a plan"):
        join_core_lease(path, "own", kernels)


def test_a_worker_that_the_plan_does_not_name_is_refused(lease_file: LeaseFile, kernels: Kernels):
    with pytest.raises(BadCorePlan, match="does not know third"):
        join_core_lease(lease_file.path, "third", kernels)
