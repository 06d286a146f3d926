"""Order of writes of one sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import Superseded
from baton.domain.ids import RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.store.memory_store import MemoryStore
from baton.store.store import SequenceRecord
from baton.store.write_behind.record_sync import RecordSync

SEQUENCE = SequenceRecord(RequestId("r"), 1, RequestState.QUEUED, "router-0", "m", 3)


def emit(sync: RecordSync) -> None:
    sync.journal.append([OutputToken(0, 7)], num_cached_tokens=0, finish=None, failure_code="")


async def test_tokens_are_journalled_after_the_fingerprint_of_their_workers():
    """Otherwise a router that takes over would continue with another model."""
    store = MemoryStore()
    sync = RecordSync(SEQUENCE)
    await sync.run(store)
    sync.update(replace(SEQUENCE, state=RequestState.DECODING, fingerprint="old"))
    emit(sync)
    assert sync.next_entry(8) is None
    await sync.run(store)
    entry = sync.next_entry(8)
    assert entry is not None
    assert entry.tokens == (7,)
    stored = await store.get(SEQUENCE.id)
    assert stored is not None
    assert stored.fingerprint == "old"


async def test_a_sequence_without_a_fingerprint_is_journalled():
    sync = RecordSync(replace(SEQUENCE, state=RequestState.DECODING))
    await sync.run(MemoryStore())
    emit(sync)
    assert sync.next_entry(8) is not None


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_lost_record_is_not_ended_before_its_journal_is_rewritten(num_tokens: int) -> None:
    sync = RecordSync(replace(SEQUENCE, state=RequestState.DECODING))
    await sync.run(MemoryStore())
    tokens = [OutputToken(index, 7) for index in range(num_tokens)]
    sync.journal.append(tokens, num_cached_tokens=0, finish=FinishReason.STOP, failure_code="")
    entry = sync.next_entry(8)
    assert entry is not None
    sync.journal.mark_written(num_tokens, ends=True)
    sync.update(replace(SEQUENCE, state=RequestState.FINISHED))
    sync.status.stale = True
    restarted = MemoryStore()
    await sync.run(restarted)
    stored = await restarted.get(SEQUENCE.id)
    assert stored is not None
    assert stored.state is RequestState.DECODING
    assert sync.next_entry(8) == entry


@pytest.mark.parametrize("tag", [0, 7])
async def test_an_owner_tag_makes_a_record_ours_whoever_it_names(tag: int) -> None:
    """A store that was rolled back may name the router before. Without a tag the name is all there is."""
    store, ours = MemoryStore(), replace(SEQUENCE, owner_tag=tag)
    await store.put_request(replace(ours, router_id="router-1"))
    sync = RecordSync(replace(ours, state=RequestState.DECODING))
    sync.status.stale = True
    if tag:
        await sync.run(store)
    else:
        with pytest.raises(Superseded):
            await sync.run(store)
    stored = await store.get(SEQUENCE.id)
    assert stored is not None
    assert stored.state is (RequestState.DECODING if tag else RequestState.QUEUED)
