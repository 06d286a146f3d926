"""The queue that tokens pass on their way through the router."""

import asyncio

import pytest

from services.router.mailbox import AsyncMailbox


async def settled() -> None:
    """Lets every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_items_come_out_in_order_whether_they_were_there_or_are_waited_for():
    mailbox: AsyncMailbox[int] = AsyncMailbox()
    mailbox.put_nowait(1)
    mailbox.put_nowait(2)
    assert [await mailbox.get(), await mailbox.get()] == [1, 2]
    reading = asyncio.create_task(mailbox.get())
    await settled()
    assert not reading.done()
    mailbox.put_nowait(3)
    mailbox.put_nowait(4)
    assert [await reading, await mailbox.get()] == [3, 4]


async def test_a_wait_ends_at_its_time_and_not_at_that_of_an_earlier_one():
    mailbox: AsyncMailbox[int] = AsyncMailbox()
    began = now()
    assert await mailbox.get_until(began + 0.01) is None
    assert now() >= began + 0.01
    soon, later = now() + 0.01, now() + 0.05
    mailbox.put_nowait(1)
    assert await mailbox.get_until(soon) == 1
    reading = asyncio.create_task(mailbox.get_until(soon))
    await settled()
    mailbox.put_nowait(2)
    assert await reading == 2
    assert await mailbox.get_until(later) is None  # the timer of the wait before goes off meanwhile
    assert now() >= later


async def test_a_shorter_wait_after_a_longer_one_ends_at_its_own_time():
    mailbox: AsyncMailbox[int] = AsyncMailbox()
    reading = asyncio.create_task(mailbox.get_until(now() + 3600))
    await settled()
    mailbox.put_nowait(1)
    assert await reading == 1
    async with asyncio.timeout(60):
        assert await mailbox.get_until(now() + 0.01) is None


async def test_waking_the_reader_gives_it_nothing_unless_something_is_there():
    mailbox: AsyncMailbox[int] = AsyncMailbox()
    mailbox.wake()  # nobody waits
    reading = asyncio.create_task(mailbox.get_until(now() + 3600))
    await settled()
    assert not reading.done()
    mailbox.wake()
    assert await reading is None
    forever = asyncio.create_task(mailbox.get())
    await settled()
    mailbox.wake()
    await settled()
    assert not forever.done()
    mailbox.put_nowait(1)
    assert await forever == 1
    mailbox.close()


async def test_who_puts_waits_for_room():
    mailbox: AsyncMailbox[int] = AsyncMailbox(capacity=1)
    await mailbox.put(1)
    writers = [asyncio.create_task(mailbox.put(item)) for item in (2, 3)]
    await settled()
    assert not any(writer.done() for writer in writers)
    assert await mailbox.get() == 1
    await settled()
    assert [writer.done() for writer in writers] == [True, False]
    assert [await mailbox.get(), await mailbox.get()] == [2, 3]


async def test_room_that_is_given_to_one_who_gives_up_goes_to_the_next():
    mailbox: AsyncMailbox[int] = AsyncMailbox(capacity=1)
    await mailbox.put(1)
    quitter, patient = asyncio.create_task(mailbox.put(2)), asyncio.create_task(mailbox.put(3))
    await settled()
    assert await mailbox.get() == 1
    quitter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quitter
    assert await mailbox.get() == 3
    assert patient.done()


async def test_a_reader_that_gives_up_loses_nothing():
    mailbox: AsyncMailbox[int] = AsyncMailbox()
    reading = asyncio.create_task(mailbox.get())
    await settled()
    mailbox.put_nowait(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await mailbox.get() == 1


async def test_a_closed_mailbox_has_no_timer_left():
    mailbox: AsyncMailbox[int] = AsyncMailbox()
    reading = asyncio.create_task(mailbox.get_until(now() + 0.01))
    await settled()
    mailbox.close()
    mailbox.close()
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.05, later.set_result, None)
    await later
    assert not reading.done()
    mailbox.wake()
    assert await reading is None
