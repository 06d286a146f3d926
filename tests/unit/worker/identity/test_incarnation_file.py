"""A worker takes over the id of a predecessor that has ended, and of no other process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.services.decode.settings import DecodeSettings
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import StoreUnavailable
from baton.worker import lifecycle
from baton.worker.identity.incarnation_file import IncarnationFile, open_incarnation_file, withdraw_predecessor
from baton.worker.lifecycle import WorkerContext, run_worker

ID = WorkerId("decode-0")
FIRST, SECOND = Incarnation(2**63 + 7), Incarnation(5)
RECORD = WorkerRecord(ID, WorkerRole.DECODE, FIRST, "10.0.0.7:50052", "m", "f", 16, 100, 100)
NEVER_S = 3000.0
SOON_S = 30.0
HOLDER = """
import sys
from pathlib import Path
from baton.worker.identity.incarnation_file import IncarnationFile
file = IncarnationFile(Path(sys.argv[1]))
file.note(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store() -> MemoryStore:
    """With the record of `FIRST`, which does not expire within a test."""
    store = MemoryStore(StoreOptions(worker_ttl_s=NEVER_S, heartbeat_s=NEVER_S / 3))
    asyncio.run(store.announce(RECORD))
    return store


@contextmanager
def holder(path: Path, incarnation: Incarnation) -> Iterator[subprocess.Popen[str]]:
    """A process that has the file."""
    command = [sys.executable, "-c", HOLDER, str(path), str(incarnation)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def ids(store: MemoryStore) -> list[tuple[WorkerId, Incarnation]]:
    return [(record.id, record.incarnation) for record in asyncio.run(store.workers())]


def withdraw(store: MemoryStore, path: Path, id: WorkerId = ID) -> None:
    file = IncarnationFile(path)
    asyncio.run(withdraw_predecessor(store, id, file))
    file.close()


def test_the_record_of_a_killed_predecessor_is_withdrawn(store, tmp_path):
    with holder(tmp_path / "decode-0", FIRST) as process:
        process.kill()
        process.wait()
        withdraw(store, tmp_path / "decode-0")
    assert ids(store) == []


def test_the_record_of_a_living_holder_stays(store, tmp_path):
    with holder(tmp_path / "decode-0", FIRST):
        withdraw(store, tmp_path / "decode-0")
        assert ids(store) == [(ID, FIRST)]


def test_a_process_without_the_lock_writes_nothing(tmp_path):
    with holder(tmp_path / "decode-0", FIRST):
        second = IncarnationFile(tmp_path / "decode-0")
        second.note(SECOND)
        second.close()
    assert (tmp_path / "decode-0").read_text() == str(FIRST)


def test_records_of_other_processes_stay(store, tmp_path):
    """The one with the id has never had the file: another machine's worker, say."""
    file = IncarnationFile(tmp_path / "decode-0")
    file.note(SECOND)
    file.close()
    asyncio.run(store.announce(replace(RECORD, id=WorkerId("decode-1"), incarnation=SECOND)))
    withdraw(store, tmp_path / "decode-0")
    assert ids(store) == [(ID, FIRST), (WorkerId("decode-1"), SECOND)]


@pytest.mark.parametrize("content", ["", "many", "-5", "x" * 1000])
def test_a_file_without_an_incarnation_withdraws_nothing(store, tmp_path, content):
    (tmp_path / "decode-0").write_text(content)
    withdraw(store, tmp_path / "decode-0")
    assert ids(store) == [(ID, FIRST)]


def test_a_shorter_incarnation_replaces_a_longer_one(tmp_path):
    for incarnation in (FIRST, SECOND):
        file = IncarnationFile(tmp_path / "decode-0")
        file.note(incarnation)
        file.close()
    file = IncarnationFile(tmp_path / "decode-0")
    assert file.ended() == SECOND
    file.close()


def test_a_store_that_does_not_answer_is_no_reason_to_end(tmp_path, monkeypatch, store):
    async def unavailable(*_: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "withdraw", unavailable)
    (tmp_path / "decode-0").write_text(str(FIRST))
    withdraw(store, tmp_path / "decode-0")


def test_a_file_is_for_its_user_only(tmp_path):
    IncarnationFile(tmp_path / "decode-0").close()
    assert (tmp_path / "decode-0").stat().st_mode & 0o777 == 0o600


def test_a_file_lies_beside_the_socket_in_an_own_directory_only(tmp_path):
    url = f"unix://{tmp_path}/s?db=1"
    for mode, is_used in ((0o700, True), (0o750, False), (0o702, False)):
        tmp_path.chmod(mode)
        file = open_incarnation_file(url, ID)
        assert (file is not None) is is_used
        if file is not None:
            file.close()
    tmp_path.chmod(0o700)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "memory://", "unix:///no/such/directory/s"])
def test_other_stores_have_no_file(url):
    assert open_incarnation_file(url, ID) is None


def test_workers_with_other_ids_have_other_files(tmp_path):
    tmp_path.chmod(0o700)
    for id in ("decode-0", "decode-1", "../decode-1"):
        file = open_incarnation_file(f"unix://{tmp_path}/s", WorkerId(id))
        assert file is not None
        file.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_successor_waits_for_no_record_to_expire(store, tmp_path, monkeypatch):
    """Without the file it would watch the record for three heartbeats before it builds its engine."""
    tmp_path.chmod(0o700)
    url = f"unix://{tmp_path}/s"
    predecessor = open_incarnation_file(url, ID)
    assert predecessor is not None
    predecessor.note(FIRST)
    predecessor.close()
    noted: list[Incarnation | None] = []

    async def connect(*_: object, **__: object) -> MemoryStore:
        return store

    async def close() -> None:
        pass

    async def serve(_: object, context: WorkerContext) -> None:
        assert [record.incarnation for record in await store.workers()] == [FIRST], "routers learn of its end as of any"
        assert context.incarnation_file is not None
        await withdraw_predecessor(store, ID, context.incarnation_file)
        assert await store.workers() == []
        context.incarnation_file.note(SECOND)
        noted.append(context.incarnation_file.ended())

    monkeypatch.setattr(store, "close", close)
    monkeypatch.setattr(lifecycle, "connect", connect)
    settings = DecodeSettings(
        worker_id=ID, redis_url=url, heartbeat_interval_s=NEVER_S / 3, worker_ttl_s=NEVER_S, port=0
    )
    started = run_worker(settings, WorkerRole.DECODE, lambda: "engine", serve)
    assert asyncio.run(asyncio.wait_for(started, SOON_S)) == 0
    assert noted == [SECOND]
