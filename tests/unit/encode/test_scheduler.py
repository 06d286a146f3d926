"""Which images are encoded next, and that every pull ends in one answer: the embedding, or a typed error."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.domain.errors import DeadlineExceeded, NeedMedia
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.store import KEEP_S, HeldMedia, MediaKey, MediaStore
from baton.services.encode.scheduler import EncodeEffect, EncodeScheduler, GiveEmbedding, RefusePull

ROWS = 4
ROW_BYTES = 8
MAX_BYTES = 5 * 2 * ROWS * ROW_BYTES


def key(number: int, salt: str = "") -> MediaKey:
    return salt, number.to_bytes(16)


def image(num_rows: int = ROWS) -> HeldMedia[Any, Any]:
    return HeldMedia("pixels", num_rows, None, num_rows * ROW_BYTES, num_rows * ROW_BYTES)


def embedding(number: int) -> ExportedEmbedding:
    return ExportedEmbedding.settle(ROWS, bytearray([number] * ROWS * ROW_BYTES))


def encode(scheduler: EncodeScheduler, *failing: int) -> tuple[list[int], list[EncodeEffect]]:
    """A step: the images that it took, and what it answered."""
    batch = [one for one, _ in scheduler.next_batch()]
    failed = [one for one in batch if int.from_bytes(one[1]) in failing]
    for one in batch:
        if one not in failed:
            scheduler.store.on_encoded(one, embedding(int.from_bytes(one[1])))
    return [int.from_bytes(one[1]) for one in batch], scheduler.commit(batch, failed)


def scheduler_with(*numbers: int, budget: int = 2 * ROWS, max_bytes: int = MAX_BYTES) -> EncodeScheduler:
    scheduler = EncodeScheduler(MediaStore(max_bytes), budget)
    for number in numbers:
        assert scheduler.hold(key(number), image(), 0.0)
    return scheduler


def test_images_are_encoded_in_their_order_within_the_budget():
    scheduler = scheduler_with(1, 2, 3)
    assert scheduler.num_waiting_rows == 3 * ROWS
    assert encode(scheduler) == ([1, 2], [])
    assert encode(scheduler) == ([3], [])
    assert (encode(scheduler), scheduler.num_waiting) == (([], []), 0)


def test_an_image_beyond_the_budget_is_encoded_alone():
    scheduler = scheduler_with(budget=1)
    scheduler.hold(key(1), image(), 0.0)
    scheduler.hold(key(2), image(), 0.0)
    assert encode(scheduler)[0] == [1]


def test_what_is_pulled_comes_first():
    scheduler = scheduler_with(1, 2, 3, budget=1)
    assert scheduler.open(7, key(3), 9.0) == []
    numbers, effects = encode(scheduler)
    assert numbers == [3]
    assert effects == [GiveEmbedding(7, scheduler.store.find(key(3)))]  # type: ignore[arg-type]


def test_an_embedding_that_is_there_is_given_at_once():
    scheduler = scheduler_with(1)
    encode(scheduler)
    (effect,) = scheduler.open(1, key(1), 9.0)
    assert isinstance(effect, GiveEmbedding)
    assert effect.item.rows == embedding(1)


def test_an_image_of_another_salt_is_not_held():
    scheduler = scheduler_with(1)
    (effect,) = scheduler.open(1, key(1, "other"), 9.0)
    assert isinstance(effect, RefusePull)
    assert isinstance(effect.error, NeedMedia)
    assert effect.error.identities == (key(1)[1],)


def test_a_fault_of_the_tower_ends_its_pulls_and_no_others():
    scheduler = scheduler_with(1, 2)
    scheduler.open(1, key(1), 9.0)
    scheduler.open(2, key(2), 9.0)
    _, effects = encode(scheduler, 1)
    refused, given = effects
    assert isinstance(refused, RefusePull)
    assert (refused.lease, isinstance(refused.error, NeedMedia)) == (1, True)
    assert isinstance(given, GiveEmbedding)
    assert scheduler.store.find(key(1)) is None


def test_a_damaged_embedding_is_never_given_away():
    scheduler = scheduler_with(1)
    encode(scheduler)
    held = scheduler.store.find(key(1))
    assert held is not None
    assert held.rows is not None
    held.rows.data[5] ^= 4
    (effect,) = scheduler.open(1, key(1), 9.0)
    assert isinstance(effect, RefusePull)
    assert (scheduler.num_damaged, scheduler.store.find(key(1)), scheduler.num_leases) == (1, None, 0)


def test_a_lease_keeps_its_image_until_it_ends():
    scheduler = scheduler_with(1)
    encode(scheduler)
    now = 2 * KEEP_S
    scheduler.open(1, key(1), now + 5.0)
    others = range(2, 2 + 5)
    assert not all(scheduler.hold(key(number), image(), now) for number in others)
    assert scheduler.store.find(key(1)) is not None
    scheduler.close(1)
    later = 2 * now
    assert all(scheduler.hold(key(number), image(), later) for number in range(20, 25))
    assert scheduler.store.find(key(1)) is None


def test_images_that_were_pulled_make_room_at_once():
    """Ten times as many as there is room for, in no time."""
    scheduler = scheduler_with()
    for number in range(1, 51):
        assert scheduler.hold(key(number), image(), 0.0)
        encode(scheduler)
        scheduler.open(number, key(number), 9.0)
        scheduler.close(number)
    assert scheduler.store.num_evicted > 0


def test_a_pull_ends_at_its_deadline_and_releases_its_image():
    scheduler = scheduler_with(1)
    scheduler.open(1, key(1), 3.0)
    assert scheduler.next_wakeup() == 3.0
    assert scheduler.expire(2.9) == []
    (effect,) = scheduler.expire(3.0)
    assert isinstance(effect, RefusePull)
    assert isinstance(effect.error, DeadlineExceeded)
    assert (scheduler.num_leases, scheduler.next_wakeup()) == (0, None)
    assert encode(scheduler)[1] == []


class Machine(RuleBasedStateMachine):
    """Any order of uploads, pulls, steps, faults of the tower and of memory, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler_with()
        self.now = 0.0
        self.num_opened = 0
        self.open: dict[int, int] = {}  # pulls without an answer
        self.leased: set[int] = set()

    def take(self, effects: list[EncodeEffect]) -> None:
        for effect in effects:
            number = self.open.pop(effect.lease)  # one answer each
            if isinstance(effect, GiveEmbedding):
                assert effect.item.rows == embedding(number)  # the right one, unharmed
            else:
                self.leased.discard(effect.lease)

    @rule(number=st.integers(1, 8))
    def hold(self, number: int) -> None:
        self.scheduler.hold(key(number), image(), self.now)

    @rule(number=st.integers(1, 8), seconds=st.integers(1, 50))
    def pull(self, number: int, seconds: int) -> None:
        self.num_opened += 1
        self.open[self.num_opened] = number
        self.leased.add(self.num_opened)
        self.take(self.scheduler.open(self.num_opened, key(number), self.now + seconds))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leased)))
        self.leased.discard(lease)
        self.open.pop(lease, None)
        self.scheduler.close(lease)

    @rule(failing=st.sets(st.integers(1, 8), max_size=2))
    def step(self, failing: set[int]) -> None:
        self.take(encode(self.scheduler, *failing)[1])

    @rule(number=st.integers(1, 8))
    def damage(self, number: int) -> None:
        held = self.scheduler.store.find(key(number))
        if held is not None and held.rows is not None and not held.pins:
            held.rows.data[0] ^= 1

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.take(self.scheduler.expire(self.now))

    @invariant()
    def is_bounded(self) -> None:
        assert self.scheduler.store.num_bytes <= MAX_BYTES

    @invariant()
    def every_open_pull_will_be_answered(self) -> None:
        wakeup = self.scheduler.next_wakeup()
        assert not self.open or (wakeup is not None and wakeup > self.now)

    def teardown(self) -> None:
        self.take(self.scheduler.expire(self.now + 1000.0))
        assert not self.open
        assert self.scheduler.num_leases == 0


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestEncodeScheduler = Machine.TestCase
