"""One job's way into the book: what may be written before what."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.ids import RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import OutputToken
from baton.state.base import RequestRecord
from baton.state.errand import Errand
from baton.state.memory import MemoryBook

JOB = RequestRecord(RequestId("r"), 1, RequestState.QUEUED, "router-0", "m", 3)


def emit(errand: Errand) -> None:
    errand.journal.add([OutputToken(0, 7)], num_cached_tokens=0, finish=None, failure_code="")


async def test_tokens_are_journalled_after_the_fingerprint_of_those_who_made_them():
    """Or a router that takes the job over would go on with another model's."""
    book = MemoryBook()
    errand = Errand(JOB)
    await errand.run(book)
    errand.aim(replace(JOB, state=RequestState.DECODING, fingerprint="old"))
    emit(errand)
    assert errand.entry(8) is None
    await errand.run(book)
    entry = errand.entry(8)
    assert entry is not None
    assert [token.token for token in entry.tokens] == [7]
    stored = await book.get(JOB.id)
    assert stored is not None
    assert stored.fingerprint == "old"


async def test_a_job_that_is_pinned_to_nobody_is_journalled():
    errand = Errand(replace(JOB, state=RequestState.DECODING))
    await errand.run(MemoryBook())
    emit(errand)
    assert errand.entry(8) is not None
