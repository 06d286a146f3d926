"""A mock worker in a process of its own, registered in a real Redis; tests kill, stop and continue it.

    python -m tests.mock_worker_process prefill|decode ID REDIS_URL [PHASE]

With PHASE the first request stops there. SIGUSR1 blocks the interpreter for a while, like a library call that holds the
GIL; then every request continues. The process ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from baton.domain.worker import LinkRecord, WorkerRecord, WorkerRole
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.store import StateStore, StoreUnavailable
from tests.mock_workers import Hold, MockDecode, MockPrefill, MockWorker, Phase, ScriptedAction

OPTIONS = StoreOptions(timeout_s=5.0)
BUSY_S = 5.0
"""Longer than a ping timeout."""


@dataclass(frozen=True, slots=True)
class MockWorkerProcess:
    """A running or stopped process."""

    id: str
    popen: subprocess.Popen[bytes]

    def signal(self, number: signal.Signals) -> None:
        """Sends SIGKILL, SIGSTOP (its machine still answers TCP), SIGCONT or SIGUSR1 (see the module)."""
        self.popen.send_signal(number)


@contextlib.contextmanager
def mock_worker_process(
    role: WorkerRole, id: str, redis_url: str, hold: Phase | None = None
) -> Iterator[MockWorkerProcess]:
    """Starts a process and kills it at the end."""
    arguments = [role.value, id, redis_url, *([hold.value] if hold is not None else [])]
    popen = subprocess.Popen([sys.executable, "-m", "tests.mock_worker_process", *arguments], stdin=subprocess.PIPE)
    try:
        yield MockWorkerProcess(id, popen)
    finally:
        popen.kill()
        popen.communicate(timeout=10.0)


async def _serve(role: WorkerRole, id: str, redis_url: str, script: list[ScriptedAction]) -> None:
    store = await connect(redis_url, OPTIONS)
    worker = MockPrefill(id, script) if role is WorkerRole.PREFILL else MockDecode(id, script)
    await worker.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _block_interpreter, worker)
    announcing = asyncio.create_task(_announce_forever(store, worker))
    try:
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await worker.stop()
        await store.close()


def _block_interpreter(worker: MockWorker) -> None:
    with_gil = ctypes.PyDLL(None)  # keeps the GIL, unlike CDLL
    with_gil.usleep(int(BUSY_S * 1e6))
    worker.release()


async def _announce_forever(store: StateStore, worker: MockWorker) -> None:
    """Registers at every heartbeat; a decode worker has a link to every prefill worker."""
    async for _ in store.changes():
        with contextlib.suppress(StoreUnavailable):  # the call was interrupted by a stop
            links = [_link(record) for record in await store.workers() if record.role is WorkerRole.PREFILL]
            await store.announce(worker.record(links if worker.role is WorkerRole.DECODE else ()))


def _link(prefill: WorkerRecord) -> LinkRecord:
    return LinkRecord(prefill.id, prefill.incarnation, "stream", 1e9, 4096)


def main() -> None:
    """Runs the worker."""
    role, id, redis_url, *hold = sys.argv[1:]
    script = [ScriptedAction(Phase(phase), Hold()) for phase in hold]
    asyncio.run(_serve(WorkerRole(role), id, redis_url, script))


if __name__ == "__main__":
    main()
