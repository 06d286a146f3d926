"""A writer of Redis without the cluster secret: what it moves, copies, cuts, replays or forges is never used.

Each test plays one attack on what a router with the secret has stored, on a real Redis.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from baton.domain.ids import AttemptId, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent
from baton.domain.request import FinishReason
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.store.ownership import OwnerLease
from baton.store.store import CallRecord, CallStatus, JournalPart
from baton.telemetry.metrics import REGISTRY
from tests.contract.stores import RARE, TRUST, WORKER
from tests.contract.strangers.stage import OURS, PROMPT, THEIRS, Stage, call, entry, sequence

EMPTY = JournalPart((), 0, None, "")


def num_unsealed(reason: str) -> float:
    return REGISTRY.get_sample_value("baton_store_unsealed_total", {"reason": reason}) or 0.0


async def stored_answer(stage: Stage, id: str = "c", tenant: str = "acme") -> None:
    """A call with a sequence and the tokens 1000..1003."""
    await stage.store.put_call(call(id, tenant))
    await stage.store.create(sequence(f"{id}-0"))
    await stage.store.write_journal([entry(0, 2, f"{id}-0"), entry(2, 4, f"{id}-0", finish=FinishReason.STOP)])


async def test_redis_holds_nothing_of_a_client_in_clear(stage: Stage) -> None:
    await stored_answer(stage, tenant="acme-corp")
    await stage.store.end_call(RequestId("c"), (1, 0), CallStatus.ENDED, b"the trace of a client")
    dump = b""
    async for key in stage.redis.scan_iter(match=f"{stage.keys.prefix}*"):
        kind = await stage.redis.type(key)
        if kind == b"hash":
            dump += repr(await stage.redis.hgetall(key)).encode()
        elif kind == b"stream":
            dump += repr(await stage.redis.xrange(key)).encode()
    for secret in (b"diary", b"acme-corp", b"/v1/completions", b"print-a", b"tiny", b"trace of", b"stop"):
        assert secret not in dump
    assert (await stage.store.get_call(RequestId("c"))).body == PROMPT  # type: ignore[union-attr]
    assert await stage.tokens("c-0") == [1000, 1001, 1002, 1003]


async def test_a_call_moved_to_another_id_is_not_found(stage: Stage) -> None:
    await stored_answer(stage, "c")
    await stored_answer(stage, "d", tenant="mallory")
    before = num_unsealed("forged")
    await stage.redis.copy(stage.call_key("c"), stage.call_key("d"), replace=True)
    assert await stage.store.get_call(RequestId("d")) is None
    await stage.redis.hset(stage.call_key("d"), "id", "d")
    assert await stage.store.get_call(RequestId("d")) is None
    assert num_unsealed("forged") == before + 2


async def test_a_call_cannot_be_given_to_another_tenant(stage: Stage) -> None:
    await stored_answer(stage, "c", tenant="acme")
    await stage.redis.hset(stage.call_key("c"), mapping={"tenant": "mallory", "body": "{}"})
    found = await stage.store.get_call(RequestId("c"))
    assert found is not None
    assert (found.tenant, found.body) == ("acme", PROMPT)
    mallory = await stage.open_as(ClusterTrust(b"m" * 32))
    clear = await stage.open_as(OPEN_CLUSTER)
    for forger in (mallory, clear):
        await stage.redis.delete(stage.call_key("c"))
        await forger.put_call(call("c", tenant="mallory"))
        assert await stage.store.get_call(RequestId("c")) is None


@pytest.mark.parametrize("length", [0, 1, 20, -1])
async def test_a_call_cut_short_is_not_found(stage: Stage, length: int) -> None:
    await stored_answer(stage)
    sealed: Any = await stage.redis.hget(stage.call_key("c"), "sealed")
    await stage.redis.hset(stage.call_key("c"), "sealed", sealed[:length])
    assert await stage.store.get_call(RequestId("c")) is None
    await stage.redis.hdel(stage.call_key("c"), "sealed")
    assert await stage.store.get_call(RequestId("c")) is None


async def test_forged_calls_are_never_run_and_hide_no_real_one(stage: Stage) -> None:
    clear = await stage.open_as(OPEN_CLUSTER)
    for number in range(2 * RARE.max_orphans):
        await clear.put_call(call(f"forged-{number}"))
    await stage.store.put_call(call("real"))
    await stage.store.release_lease(OURS)
    for _ in range(3):
        orphans = await stage.store.list_orphans()
        if orphans:
            break
    assert [orphan.id for orphan in orphans] == ["real"]
    assert await stage.store.claim_call(RequestId("forged-0"), (1, 0), THEIRS) is None


async def test_records_of_another_form_keep_no_call_from_its_next_owner(stage: Stage) -> None:
    """What scripts read in clear is missing, no number, no list or of another type: other calls are still claimed."""
    redis, keys = stage.redis, stage.keys
    for number, damage in enumerate(({}, {"opened": "nan"}, {"opened": "soon"}, {"sequence_ids": "]"}, {"epoch": "x"})):
        await stage.store.put_call(call(f"bad-{number}"))
        await redis.hdel(stage.call_key(f"bad-{number}"), "opened")
        if damage:
            await redis.hset(stage.call_key(f"bad-{number}"), mapping=dict[Any, Any](damage))
    await stage.store.put_call(call("text"))
    await redis.set(stage.call_key("text"), "no hash")
    await stage.store.put_call(call("real"))
    await redis.set(keys.sequence(RequestId("bad-1-0")), "no hash")
    await redis.set(keys.calls_of(OwnerId("mallory")), "no index")
    await redis.sadd(keys.owners, "mallory")
    await stage.store.release_lease(OURS)
    claimed = set[str]()

    async def take(record: CallRecord) -> None:
        claimed.add(record.id)

    lease = OwnerLease(stage.store, THEIRS, take, owner_ttl_s=1.0)
    async with asyncio.timeout(20), lease:
        while "real" not in claimed:
            assert await lease.wait_for_renewal()
    assert claimed <= {"real", *(f"bad-{number}" for number in range(5))}


async def test_worker_records_of_another_form_hide_no_worker(stage: Stage) -> None:
    await stage.store.announce(WORKER)
    await stage.redis.zadd(stage.keys.workers, dict.fromkeys((b"\xff\xfe", b"text", b"torn", b"gone"), 1e15))
    await stage.redis.set(stage.keys.worker(WorkerId("text")), "no hash")
    await stage.redis.hset(stage.keys.worker(WorkerId("torn")), "record", b'{"id": "\xff')
    assert [record.id for record in await stage.store.workers()] == ["decode-0"]


async def test_a_call_put_back_after_its_time_is_not_run(stage: Stage) -> None:
    old = call("c", created_s=int(time.time() - 2 * RARE.retention_s - 60))
    await stage.store.put_call(old)
    await stage.store.release_lease(OURS)
    before = num_unsealed("replayed")
    assert await stage.store.list_orphans() == []
    assert num_unsealed("replayed") == before + 1


async def test_tokens_of_another_sequence_are_not_read(stage: Stage) -> None:
    await stored_answer(stage, "c")
    await stored_answer(stage, "d")
    await stage.redis.copy(stage.journal_key("c-0"), stage.journal_key("d-0"), replace=True)
    assert await stage.store.read_journal(RequestId("d-0"), 0, 0.0) == EMPTY


async def rewritten(stage: Stage, entries: list[tuple[str, bytes]]) -> JournalPart:
    """The journal as the router reads it, with these entries."""
    await stage.redis.delete(stage.journal_key("c-0"))
    for id, payload in entries:
        await stage.redis.xadd(stage.journal_key("c-0"), {"d": payload}, id)
    return await stage.store.read_journal(RequestId("c-0"), 0, 0.0)


async def test_an_answer_cannot_be_cut_short_or_put_out_of_order(stage: Stage) -> None:
    await stored_answer(stage)
    held: Any = await stage.redis.xrange(stage.journal_key("c-0"))
    first, last = (fields[b"d"] for _, fields in held)
    assert (await rewritten(stage, [("2-0", first), ("4-1", last)])).finish is FinishReason.STOP
    assert await rewritten(stage, [("2-1", last)]) == EMPTY  # the end alone
    assert await rewritten(stage, [("2-0", last), ("4-1", first)]) == EMPTY  # in another order
    again = await rewritten(stage, [("2-0", first), ("4-1", first)])  # the beginning, marked as the end
    assert ([token.token for token in again.tokens], again.ended) == ([1000, 1001], False)


async def test_forged_tokens_are_not_read_and_do_not_keep_a_reader_busy(stage: Stage) -> None:
    await stage.store.put_call(call())
    await stage.store.create(sequence())
    await stage.store.write_journal([entry(0, 2)])
    clear = await stage.open_as(OPEN_CLUSTER)
    await clear.write_journal([entry(2, 4, finish=FinishReason.STOP)])
    await stage.redis.xadd(stage.journal_key("c-0"), {"other": b""}, "9-1")
    before, began = num_unsealed("clear"), asyncio.get_running_loop().time()
    assert await stage.tokens("c-0") == [1000, 1001]
    assert await stage.store.read_journal(RequestId("c-0"), 2, 0.2) == EMPTY
    assert asyncio.get_running_loop().time() - began >= 0.2
    assert num_unsealed("clear") <= before + 3


async def test_a_sequence_is_read_with_its_own_fields_only(stage: Stage) -> None:
    await stage.store.create(sequence("c-0", "print-a"))
    await stage.store.create(sequence("d-0", "print-b"))
    keys = [stage.keys.sequence(RequestId(id)) for id in ("c-0", "d-0")]
    assert (await stage.store.get(RequestId("d-0"))).fingerprint == "print-b"  # type: ignore[union-attr]
    foreign = await stage.redis.hget(keys[0], "fingerprint")
    await stage.redis.hset(keys[1], "fingerprint", foreign)
    assert await stage.store.get(RequestId("d-0")) is None
    await stage.redis.hset(keys[0], "model", "other")
    assert (await stage.store.get(RequestId("c-0"))).model == "tiny"  # type: ignore[union-attr]
    await stage.redis.hset(keys[0], "attempt", "many")
    assert await stage.store.get(RequestId("c-0")) is None


async def test_a_forged_trace_is_left_out(stage: Stage) -> None:
    await stage.store.put_call(call())
    await stage.store.end_call(RequestId("c"), (1, 0), CallStatus.ENDED, b"times")
    await stage.redis.hset(stage.call_key("c"), "trace", b"\x00invented")
    found = await stage.store.get_call(RequestId("c"))
    assert found is not None
    assert (found.body, found.trace) == (PROMPT, b"")


async def test_records_survive_a_rotation_of_secrets(stage: Stage) -> None:
    await stored_answer(stage)
    await stage.store.advance(AttemptId(RequestId("c-0"), 1), RequestEvent.ENQUEUE, fingerprint="print-a")
    new = b"the next secret of the cluster .."
    swapped = await stage.open_as(ClusterTrust(new, second_secret=TRUST.secret))
    removed = await stage.open_as(ClusterTrust(new))
    found = await swapped.claim_call(RequestId("c"), (1, 0), THEIRS)
    assert found is not None
    assert (found.body, found.owner, found.epoch) == (PROMPT, THEIRS, 2)
    assert len((await swapped.read_journal(RequestId("c-0"), 0, 0.0)).tokens) == 4
    before = num_unsealed("unknown_key")
    assert await removed.get_call(RequestId("c")) is None
    assert num_unsealed("unknown_key") == before + 1
