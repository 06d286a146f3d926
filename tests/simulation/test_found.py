"""What the simulation has found: each failure again, in its smallest form."""

from baton.domain.ids import RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.state import ledger
from baton.state.base import RequestRecord
from baton.state.errand import Errand
from baton.state.memory import MemoryBook
from baton.state.trust import Trust

NAME = RequestId("r")


class _SlowToAnswer(MemoryBook):
    """While it is asked where a request stands, the request is lost once more and tried again."""

    def __init__(self) -> None:
        super().__init__()
        self.errand: Errand | None = None

    async def get(self, id: RequestId) -> RequestRecord | None:
        errand, self.errand = self.errand, None
        if errand is not None:
            for event in (RequestEvent.PROMISE, RequestEvent.INTERRUPT, RequestEvent.RETRY):
                attempt = errand.goal.attempt + ledger.num_opened(event)
                errand.goal = ledger.moved(errand.goal, attempt, event)
        return await super().get(id)


async def test_a_request_that_moves_on_while_the_book_is_asked_is_still_written():
    """The record was entered under the newer attempt and then taken for one of somebody else's."""
    book = _SlowToAnswer()
    errand = Errand(RequestRecord(NAME, 1, RequestState.QUEUED, "router-0", "m", 3), trust=Trust(doubtful=True))
    book.errand = errand
    await errand.run(book)
    assert not errand.forsaken
    record = await book.get(NAME)
    assert record is not None
    assert (record.state, record.attempt) == (RequestState.QUEUED, 2)
