"""Places of chats whose images are fetched: bounded, fair to tenants, and none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import Overloaded
from baton.services.router.vision.remote.fetch_places import MAX_FETCHING_CHATS, MAX_OF_TENANT, FetchPlaces

PATIENCE_S = 30.0


class Chats:
    """Chats that fetch until they are told to end."""

    def __init__(self, timeout_s: float = PATIENCE_S) -> None:
        self.places = FetchPlaces(timeout_s)
        self.inside: Counter[str] = Counter()

    async def _run(self, tenant: str, may_end: asyncio.Event) -> None:
        async with self.places.take(tenant):
            self.inside[tenant] += 1
            try:
                await may_end.wait()
            finally:
                self.inside[tenant] -= 1

    async def begin(self, tenant: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A chat; it has its place, or waits for it, when this returns."""
        may_end = asyncio.Event()
        task = asyncio.create_task(self._run(tenant, may_end))
        await settle()
        return task, may_end


async def settle() -> None:
    """Lets every task go as far as it can."""
    for _ in range(8):
        await asyncio.sleep(0)


async def end(*chats: tuple[asyncio.Task[None], asyncio.Event]) -> None:
    for _, may_end in chats:
        may_end.set()
    await asyncio.gather(*(task for task, _ in chats))


async def test_a_tenant_leaves_places_to_others() -> None:
    w = Chats()
    greedy = [await w.begin("greedy") for _ in range(MAX_FETCHING_CHATS + 1)]
    assert w.inside["greedy"] == MAX_OF_TENANT < MAX_FETCHING_CHATS
    other = await w.begin("other")
    assert w.inside["other"] == 1
    await end(other, *greedy)


async def test_without_keys_everybody_shares_all_places() -> None:
    w = Chats()
    chats = [await w.begin("") for _ in range(MAX_FETCHING_CHATS + 1)]
    assert w.inside[""] == MAX_FETCHING_CHATS
    await end(*chats)


async def test_a_place_goes_to_the_tenant_that_holds_the_fewest() -> None:
    w = Chats()
    first = [await w.begin("a") for _ in range(MAX_OF_TENANT)]
    second = [await w.begin("b") for _ in range(MAX_FETCHING_CHATS - MAX_OF_TENANT)]
    late_a, late_b, late_c = await w.begin("a"), await w.begin("b"), await w.begin("c")
    await end(first.pop())
    assert w.inside["c"] == 1, "it came last, and holds none"
    await end(first.pop())
    assert w.inside["b"] == len(second) + 1
    await end(*first, *second, late_a, late_b, late_c)


async def test_one_that_waits_in_vain_is_told_when_to_try_again() -> None:
    w = Chats(timeout_s=0.01)
    chats = [await w.begin("a") for _ in range(MAX_OF_TENANT)]
    with pytest.raises(Overloaded, match="images of this tenant") as told:
        async with w.places.take("a"):
            pass
    assert told.value.retry_after_s == 0.01
    await end(*chats)
    async with w.places.take("a"):
        pass


async def test_a_client_that_leaves_takes_no_place_along() -> None:
    w = Chats()
    chats = [await w.begin("") for _ in range(MAX_FETCHING_CHATS)]
    waiting, _ = await w.begin("")
    chats[0][1].set()
    await chats[0][0]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await settle()
    free = await w.begin("")
    assert w.inside[""] == MAX_FETCHING_CHATS
    await end(*chats[1:], free)


async def test_a_place_that_comes_as_its_client_leaves_goes_on() -> None:
    """The place is given in one pass of the loop with the cancellation."""
    w = Chats()
    places = w.places
    for _ in range(MAX_FETCHING_CHATS):
        await places._acquire("")
    waiting, _ = await w.begin("")
    places._give_back("")  # to the one that waits, which has not run yet
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert places._taken[""] == MAX_FETCHING_CHATS - 1


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from(["begin", "end", "cancel"])), max_size=60)
)
def test_no_place_is_lost_and_no_bound_passed(steps: list[tuple[str, str]]) -> None:
    async def run() -> None:
        w = Chats()
        chats: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []
        for tenant, step in steps:
            if step == "begin":
                chats.append((tenant, *await w.begin(tenant)))
            elif (found := next((one for one in chats if one[0] == tenant), None)) is not None:
                chats.remove(found)
                if step == "end":
                    found[2].set()
                else:
                    found[1].cancel()
                await settle()
            assert w.inside.total() <= MAX_FETCHING_CHATS
            assert all(count <= MAX_OF_TENANT for tenant, count in w.inside.items() if tenant)
            waiting = Counter(tenant for tenant, task, _ in chats if not task.done()) - w.inside
            if w.inside.total() < MAX_FETCHING_CHATS:
                assert all(w.inside[tenant] == MAX_OF_TENANT for tenant in waiting), "one that may have it waits"
        for _, _, may_end in chats:
            may_end.set()
        await asyncio.gather(*(task for _, task, _ in chats))
        assert not w.places._taken
        assert not w.places._waiting

    asyncio.run(run())
