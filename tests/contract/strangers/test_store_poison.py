"""A writer of Redis without the cluster secret leaves keys of another type or form: only their own records suffer.

Each test puts one such key where scripts and readers come by, on a real Redis, and then does what others need.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.domain.ids import AttemptId, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.domain.trust import OPEN_CLUSTER
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.media.redis_media_file_store import RedisMediaFileStore
from baton.store.options import StoreOptions
from baton.store.ownership import OwnerLease
from baton.store.redis.record_codec import worker_to_json
from baton.store.redis.redis_store import RedisStore
from baton.store.store import CallStatus
from baton.store.tenants.redis_tenant_store import RedisTenantStore
from baton.store.tenants.tenant_store import RateTake
from baton.store.views.redis_view_store import RedisViewStore
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from tests.contract.stores import RARE, TRUST, WORKER, listening
from tests.contract.strangers.stage import OURS, PROMPT, THEIRS, Stage, call, entry, sequence

TEXT = b"\xff no hash, no set, no text"
ABSURD = ("", "x", "-1", "nan", "inf", "1e300", "9" * 30, b"\xff")
"""Values of fields that scripts compute with."""


async def put_other_type(stage: Stage, key: str) -> None:
    """Replaces a key by one of another type, for good."""
    is_text = await stage.redis.type(key) == b"string"
    await stage.redis.delete(key)
    await (stage.redis.sadd(key, TEXT) if is_text else stage.redis.set(key, TEXT))


async def write_rest(writer: StoreWriter, id: str) -> None:
    """The other tokens and the end of a call; returns when everything is written, or not."""
    attempt = AttemptId(RequestId(f"{id}-0"), 1)
    writer.write_tokens(attempt, [OutputToken(index, 1000 + index) for index in range(1, 4)], num_cached_tokens=0)
    await writer.flush(1.0)
    writer.write_tokens(attempt, (), num_cached_tokens=0, finish=FinishReason.STOP)
    writer.advance(attempt, RequestEvent.FINISH, num_emitted=4)
    writer.end_call(RequestId(id), CallStatus.ENDED)
    await writer.flush(1.0)


async def begin_answer(writer: StoreWriter, id: str) -> None:
    writer.open_call(call(id))
    writer.create(sequence(f"{id}-0"))
    for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.DECODE):
        writer.advance(AttemptId(RequestId(f"{id}-0"), 1), event)
    writer.write_tokens(AttemptId(RequestId(f"{id}-0"), 1), [OutputToken(0, 1000)], num_cached_tokens=0)
    await writer.flush(1.0)


async def spend_stream_ids(stage: Stage, key: str, id: str) -> None:
    await stage.redis.xadd(key, {"d": b""}, id)
    await stage.redis.xdel(key, id)


async def poison(stage: Stage, what: str) -> None:
    """Damages what the store has of the call `bad`, whose sequence is `bad-0`, or what all calls of its owner share."""
    redis, keys, id = stage.redis, stage.keys, RequestId("bad-0")
    kind, _, value = what.partition(" ")
    match kind:
        case "call":
            await put_other_type(stage, stage.call_key("bad"))
        case "sequence":
            await put_other_type(stage, keys.sequence(id))
        case "journal":
            await put_other_type(stage, stage.journal_key("bad-0"))
        case "owners":
            await put_other_type(stage, keys.owners)
        case "calls":
            await put_other_type(stage, keys.calls_of(OURS))
        case "stream":
            await redis.xadd(stage.journal_key("bad-0"), {"d": b""}, value)
        case "spent":
            await spend_stream_ids(stage, stage.journal_key("bad-0"), value)
        case field if field in ("epoch", "owner_tag", "owner", "status"):
            await redis.hset(stage.call_key("bad"), field, value.encode("latin-1"))
        case field:
            await redis.hset(keys.sequence(id), field, value.encode("latin-1"))


POISONS = [
    *("call", "sequence", "journal", "owners", "calls", "spent 9-0", "spent 18446744073709551615-0"),
    *("stream 18446744073709551615-0", "stream 9007199254740995-0", "stream 9-7"),
    *(f"{field} {value}" for field in ("epoch", "owner_tag", "attempt", "num_emitted") for value in ("x", "nan", "-1")),
    *("status \xff", "owner \xff", "state \xff", "attempt 1e300", "epoch 1e300"),
]


@pytest.mark.parametrize("what", POISONS)
async def test_one_damaged_call_does_not_keep_others_from_the_store(stage: Stage, what: str) -> None:
    """The flusher writes the chains and journals of all calls together: one record may not stop the others."""
    degraded: list[bool] = []
    async with StoreWriter(stage.store, WriterOptions(retry_s=0.05), on_degraded=degraded.append) as writer:
        for id in ("bad", "good"):
            await begin_answer(writer, id)
        await poison(stage, what)
        for id in ("bad", "good"):
            await write_rest(writer, id)
        await begin_answer(writer, "later")
        await write_rest(writer, "later")
        assert writer.num_pending == 0
    assert True not in degraded, "the store has answered all the time"
    for id in ("good", "later"):
        assert await stage.tokens(f"{id}-0") == [1000, 1001, 1002, 1003]
        found = await stage.store.get(RequestId(f"{id}-0"))
        assert found is not None
        assert found.state is RequestState.FINISHED


@pytest.mark.parametrize("kind", ["call", "sequence", "call index", "owners"])
async def test_a_key_of_another_type_counts_as_missing_and_is_replaced(stage: Stage, kind: str) -> None:
    await stage.store.put_call(call())
    await stage.store.create(sequence())
    names = {"call": stage.call_key("c"), "sequence": stage.keys.sequence(RequestId("c-0"))}
    shared = {"call index": stage.keys.calls_of(OURS), "owners": stage.keys.owners}
    await put_other_type(stage, (names | shared)[kind])
    assert (await stage.store.get_call(RequestId("c")) is None) is (kind == "call")
    assert (await stage.store.get(RequestId("c-0")) is None) is (kind == "sequence")
    await stage.store.put_call(call())
    await stage.store.put_call(call("d"))
    await stage.store.put_request(sequence())
    assert (await stage.store.get_call(RequestId("c"))).body == PROMPT  # type: ignore[union-attr]
    assert (await stage.store.get(RequestId("c-0"))).model == "tiny"  # type: ignore[union-attr]
    await stage.store.release_lease(OURS)
    assert "d" in [orphan.id for orphan in await stage.store.list_orphans()]


@pytest.mark.parametrize("value", [None, *ABSURD])
async def test_a_lease_of_another_form_is_renewed(stage: Stage, value: Any) -> None:
    first = await stage.store.hold_lease(OURS, 1)
    if value is None:
        await put_other_type(stage, stage.keys.lease(OURS))
    else:
        await stage.redis.set(stage.keys.lease(OURS), value)
    second = await stage.store.hold_lease(OURS, 2)
    assert (second.generation, second.number) == (first.generation, 0)
    assert (await stage.store.hold_lease(OURS, 3)).number == 2


@pytest.mark.parametrize("value", [None, "", b"\xff\xfe", b"\x00", "a b", "a" * 65])
async def test_a_generation_of_another_form_is_drawn_again(stage: Stage, value: Any) -> None:
    await stage.store.hold_lease(OURS, 1)
    if value is None:
        await put_other_type(stage, stage.keys.generation)
    else:
        await stage.redis.set(stage.keys.generation, value)
    second, third = await stage.store.hold_lease(OURS, 2), await stage.store.hold_lease(THEIRS, 1)
    assert second.generation == third.generation
    assert second.generation.isalnum()


@pytest.mark.parametrize("damage", ["[[]]", "[null]", "[1]", "{}", "5", "[" * 5000, '["x"' + ', "x"' * 2000 + "]"])
async def test_the_sequences_of_a_call_keep_no_owner_from_other_claims(stage: Stage, damage: str) -> None:
    for id in ("bad", "real"):
        await stage.store.put_call(call(id))
    await stage.redis.hset(stage.call_key("bad"), "sequence_ids", damage)
    await put_other_type(stage, stage.keys.sequence(RequestId("real-0")))
    await stage.store.release_lease(OURS)
    for orphan in await stage.store.list_orphans():
        await stage.store.claim_call(orphan.id, orphan.ballot, THEIRS)
    real = await stage.store.get_call(RequestId("real"))
    assert real is not None
    assert real.owner == THEIRS
    assert (await stage.store.get(RequestId("real-0"))).attempt == 1001  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ABSURD)
async def test_a_call_with_no_ballot_is_no_orphan(stage: Stage, value: Any) -> None:
    for id in ("bad", "real"):
        await stage.store.put_call(call(id))
    await stage.redis.hset(stage.call_key("bad"), "epoch", value)
    await stage.store.release_lease(OURS)
    await stage.store.list_orphans()
    assert [orphan.id for orphan in await stage.store.list_orphans()] == ["real"]
    assert await stage.redis.zrange(stage.keys.calls_of(OURS), 0, -1) == [b"real"]


async def test_a_copy_of_a_call_makes_no_orphan_of_it(stage: Stage) -> None:
    """The copy names the call that it was made of, which its owner runs."""
    await stage.store.put_call(call("real"))
    await stage.redis.copy(stage.call_key("real"), stage.call_key("copy"))
    await stage.redis.hset(stage.call_key("copy"), "owner", "mallory/1")
    await stage.redis.zadd(stage.keys.calls_of(OwnerId("mallory/1")), {"copy": 1})
    await stage.redis.sadd(stage.keys.owners, "mallory/1")
    assert await stage.store.list_orphans() == []


async def test_a_claim_whose_call_is_replaced_stops_no_other_claim(stage: Stage) -> None:
    """The claim's answer was lost, and the call is read again with every renewal."""
    for id in ("bad", "real"):
        await stage.store.put_call(call(id))
    await stage.store.release_lease(OURS)
    claimed = set[str]()

    async def take(record: Any) -> None:
        claimed.add(record.id)

    lease = OwnerLease(stage.store, THEIRS, take, owner_ttl_s=0.4)
    bad = next(orphan for orphan in await stage.store.list_orphans() if orphan.id == "bad")
    lease.confirm(bad, take)
    await put_other_type(stage, stage.call_key("bad"))
    async with asyncio.timeout(20), lease:
        while "real" not in claimed:
            await lease.wait_for_renewal()
    assert claimed == {"real"}


@pytest.mark.parametrize("key", ["worker", "incarnations", "workers"])
async def test_a_worker_announces_itself_over_a_key_of_another_type(stage: Stage, key: str) -> None:
    names = {
        "worker": stage.keys.worker(WORKER.id),
        "incarnations": stage.keys.incarnations(WORKER.id),
        "workers": stage.keys.workers,
    }
    other = replace(WORKER, id=WorkerId("decode-1"), incarnation=Incarnation(5))
    for worker in (WORKER, other):
        await stage.store.announce(worker)
    await put_other_type(stage, names[key])
    for worker in (WORKER, other):
        assert await stage.store.announce(worker)
    assert [record.id for record in await stage.store.workers()] == ["decode-0", "decode-1"]
    await put_other_type(stage, names[key])
    await stage.store.withdraw(other.id, other.incarnation)


async def test_a_worker_record_with_a_deep_field_hides_no_worker(stage: Stage) -> None:
    await stage.store.announce(WORKER)
    await stage.redis.zadd(stage.keys.workers, {"deep": 1e15})
    deep = b'{"x":' + b"[" * 10**5 + b"]" * 10**5 + b"}"
    await stage.redis.hset(stage.keys.worker(WorkerId("deep")), "record", deep)
    assert [record.id for record in await stage.store.workers()] == ["decode-0"]


async def test_a_copy_of_a_worker_under_another_key_does_not_stand_for_it(stage: Stage) -> None:
    """`baton drain` and a worker's start look a worker up by its id: the first of two would do."""
    await stage.store.announce(WORKER)
    for name in (b"a", b"z"):
        await stage.redis.zadd(stage.keys.workers, {name: 1e15})
        copy = worker_to_json(replace(WORKER, address="10.6.6.6:1"))
        await stage.redis.hset(stage.keys.worker(WorkerId(name.decode())), "record", copy)
    assert await stage.store.workers() == [WORKER]


@pytest.mark.parametrize("digits", [21, 400, 5000])
async def test_a_worker_with_a_number_that_is_too_large_is_left_out(stage: Stage, digits: int) -> None:
    """Readers would fail at all workers: no float is so large."""
    await stage.store.announce(WORKER)
    record = worker_to_json(replace(WORKER, id=WorkerId("huge"), page_bytes=31415926)).replace("31415926", "9" * digits)
    await stage.redis.zadd(stage.keys.workers, {"huge": 1e15})
    await stage.redis.hset(stage.keys.worker(WorkerId("huge")), "record", record)
    assert await stage.store.workers() == [WORKER]


async def test_a_worker_whose_name_is_no_text_is_left_out(stage: Stage) -> None:
    """Its record is whole: readers get to its texts."""
    await stage.store.announce(WORKER)
    record = worker_to_json(replace(WORKER, id=WorkerId("odd"), model="no-text")).encode().replace(b"no-text", TEXT)
    await stage.redis.zadd(stage.keys.workers, {"odd": 1e15})
    await stage.redis.hset(stage.keys.worker(WorkerId("odd")), "record", record)
    assert await stage.store.workers() == [WORKER]


async def test_calls_that_wait_do_not_delay_the_list_of_workers(stage: Stage, server: LocalRedis) -> None:
    store = RedisStore(server.url, replace(poisoned_options(stage), max_connections=1, timeout_s=2.0))
    await store.announce(WORKER)
    pool: Any = store._call_client.redis.connection_pool
    busy = await pool.get_connection()
    assert await store.workers() == [WORKER]
    await pool.release(busy)
    await store.close()


async def test_a_journal_with_a_code_that_is_no_text_ends_before_it(stage: Stage) -> None:
    clear = await stage.open_as(OPEN_CLUSTER)
    await clear.put_call(call())
    await clear.create(sequence())
    await clear.write_journal([entry(0, 2), entry(2, 4, failure_code="no-text")])
    key = stage.journal_key("c-0")
    entries: Any = await stage.redis.xrevrange(key, count=1)
    last, fields = entries[0]
    await stage.redis.xdel(key, last)
    await stage.redis.xadd(key, {b"d": fields[b"d"].replace(b"no-text", b"\xff" * 7)}, "9-1")
    part = await clear.read_journal(RequestId("c-0"), 0, 0.0)
    assert [token.token for token in part.tokens] == [1000, 1001]


async def test_a_message_that_is_no_text_ends_no_subscription(stage: Stage) -> None:
    async with listening(stage.store) as changes:
        await anext(changes)
        await anext(changes)  # it has subscribed
        for _ in range(2):
            await stage.redis.publish(stage.keys.changes, TEXT)
            await anext(changes)
        await stage.store.announce(WORKER)
        await anext(changes)
        assert (await stage.redis.pubsub_numsub(stage.keys.changes))[0][1] == 1


def poisoned_options(stage: Stage) -> StoreOptions:
    return replace(RARE, prefix=stage.keys.prefix)


async def test_the_service_of_others_is_read_beside_entries_of_another_form(stage: Stage, server: LocalRedis) -> None:
    store, key = RedisTenantStore(server.url, poisoned_options(stage)), f"{stage.keys.prefix}service"
    await put_other_type(stage, key)
    await store.share_service(OURS, {"t": 1.0})
    await stage.redis.hset(key, mapping=dict[Any, Any]({b"\xff": b"9" * 30 + b" {}", "m": b"1 \xff", "n": TEXT}))
    await store.share_service(THEIRS, {"t": 2.0})
    now = b"%d " % ((await stage.redis.time())[0] * 1000)
    await stage.redis.hset(
        key, mapping=dict[Any, Any]({b"\xfe": now + b"\xff", "deep": now + b"[" * 10**5, "odd": now + b'{"\xff": 1}'})
    )
    assert await store.share_service(OURS, {"t": 1.0}) == {THEIRS: {"t": 2.0}}
    await store.close()


@pytest.mark.parametrize("value", [None, *ABSURD])
async def test_a_bucket_of_another_form_is_full(stage: Stage, server: LocalRedis, value: Any) -> None:
    store, key = RedisTenantStore(server.url, poisoned_options(stage)), f"{stage.keys.prefix}rate:acme:requests"
    if value is None:
        await put_other_type(stage, key)
    else:
        await stage.redis.set(key, value)
    assert await store.take([RateTake("acme:requests", 1, 60.0), RateTake("all:requests", 1, 60.0)]) == 0.0
    await store.close()


async def test_views_are_exchanged_over_keys_of_another_type(stage: Stage, server: LocalRedis) -> None:
    store = RedisViewStore(server.url, poisoned_options(stage), TRUST, "tiny")
    for key in store._keys:
        await put_other_type(stage, key)
    await store.exchange(OURS, b"ours", watching=True)
    for key in store._keys:
        await put_other_type(stage, key)
    await store.exchange(OURS, b"", watching=True)
    await store.exchange(THEIRS, b"theirs", watching=True)
    await stage.redis.hset(store._keys[0], mapping=dict[Any, Any]({"m": b"9" * 30 + b" " + b"9" * 30, b"\xff": TEXT}))
    found = await store.exchange(OURS, b"", watching=True)
    assert [(view.owner, view.payload) for view in found.views] == [(THEIRS, b"theirs")]
    await store.close()


@pytest.mark.parametrize("sum_of_all", [None, *ABSURD])
async def test_images_are_stored_over_counts_of_another_form(stage: Stage, server: LocalRedis, sum_of_all: Any) -> None:
    store = RedisMediaFileStore(server.url, poisoned_options(stage), TRUST)
    names = [f"{stage.keys.prefix}media-expiry", f"{stage.keys.prefix}media-bytes"]
    await store.put("acme", b"one", b"an image")
    await put_other_type(stage, f"{stage.keys.prefix}media:{store._names('acme', b'one')[0]}")
    if sum_of_all is None:
        for name in names:
            await put_other_type(stage, name)
    else:
        await stage.redis.hset(names[1], mapping=dict[Any, Any]({"": sum_of_all, "old": sum_of_all}))
        await stage.redis.zadd(names[0], dict.fromkeys((b"old", b"\xff"), 1))
    for identity in (b"one", b"two"):
        assert (await store.put("acme", identity, b"an image")).value == "kept"
        assert await store.get("acme", identity) == b"an image"
    await store.close()


async def test_a_journal_write_over_spent_ids_asks_for_the_whole_journal(stage: Stage) -> None:
    await stage.store.put_call(call())
    await stage.store.create(sequence())
    await stage.store.create(sequence("d-0"))
    await stage.store.write_journal([entry(0, 2)])
    await spend_stream_ids(stage, stage.journal_key("c-0"), "9-0")
    outcomes = await stage.store.write_journal([entry(2, 4), entry(0, 2, "d-0")])
    assert [outcome.value for outcome in outcomes] == ["gap", "done"]
    await stage.store.write_journal([entry(0, 4)])
    assert await stage.tokens("c-0") == [1000, 1001, 1002, 1003]
