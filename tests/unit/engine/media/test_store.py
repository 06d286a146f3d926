"""The store of images: bounded, least recently used first, pinned ones stay, and a salt finds only its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, RequestId
from baton.domain.worker import MediaCounts
from baton.engine.media.store import KEEP_S, HeldMedia, MediaKey, MediaStore

Store = MediaStore[str, str]


def item(input_bytes: int = 30, row_bytes: int = 10) -> HeldMedia[str, str]:
    return HeldMedia("pixels", 4, None, input_bytes, row_bytes)


def key(number: int, salt: str = "") -> MediaKey:
    return salt, number.to_bytes(16)


def attempt(number: int) -> AttemptId:
    return AttemptId(RequestId(f"r{number}"), 1)


def test_the_least_recently_used_image_makes_room():
    store = Store(100)
    assert all(store.hold(key(n), item()) for n in (1, 2))
    store.find(key(1))
    assert store.hold(key(3), item())
    assert [store.find(key(n)) is not None for n in (1, 2, 3)] == [True, False, True]
    assert store.num_evicted == 1


def test_a_pinned_image_stays_and_a_full_store_refuses():
    store = Store(80)
    assert all(store.hold(key(n), item()) for n in (1, 2))
    store.pin(attempt(1), [key(1), key(2), key(9)])
    assert not store.hold(key(3), item())
    assert not store.hold(key(3), item(input_bytes=1000))
    store.unpin(attempt(1))
    store.unpin(attempt(1))
    assert store.hold(key(3), item())


def test_an_image_is_kept_for_its_prompt_but_not_for_ever():
    store = Store(80)
    assert all(store.hold(key(n), item()) for n in (1, 2))
    for n in (1, 2, 9):
        store.keep(key(n), 5.0)
    assert not store.hold(key(3), item(), 5.0 + KEEP_S - 0.1)
    store.end_keep([key(2), key(9)])
    assert store.hold(key(3), item(), 6.0)
    assert store.find(key(1)) is not None
    assert store.hold(key(4), item(), 5.0 + KEEP_S), "the wait ends by itself"


def test_an_embedding_takes_the_place_of_its_inputs():
    store = Store(100)
    store.hold(key(1), item())
    assert store.num_bytes == 40
    assert store.get(key(1)[1]) is None
    store.on_encoded(key(1), "rows")
    assert (store.num_bytes, store.get(key(1)[1])) == (10, "rows")
    store.on_encoded(key(7), "rows")  # dropped meanwhile
    store.drop(key(1))
    assert (store.num_bytes, store.get(key(1)[1])) == (0, None)


def test_a_salt_finds_only_its_own_images():
    store = Store(100)
    store.hold(key(1, "a"), item())
    assert store.find(key(1, "b")) is None
    store.hold(key(1, "b"), item())
    store.on_encoded(key(1, "b"), "rows")
    found = store.find(key(1, "a"))
    assert found is not None
    assert found.rows is None
    store.drop(key(1, "b"))
    assert store.get(key(1)[1]) is None


@given(st.lists(st.tuples(st.sampled_from("hpuedf"), st.integers(0, 5), st.integers(0, 60)), max_size=60))
def test_bytes_never_exceed_the_bound_and_pins_hold(steps: list[tuple[str, int, int]]):
    store = Store(100)
    pinned: dict[int, set[MediaKey]] = {}
    for action, number, size in steps:
        one = key(number)
        match action:
            case "h":
                store.hold(one, item(size, size // 2))
            case "p" if number not in pinned:
                held = {k for k in (one, key(number // 2)) if store.find(k) is not None}
                store.pin(attempt(number), held)
                pinned[number] = held
            case "u":
                store.unpin(attempt(number))
                pinned.pop(number, None)
            case "e":
                store.on_encoded(one, "rows")
            case "f":
                store.find(one)
            case "d":
                store.drop(one)
                for keys in pinned.values():
                    keys.discard(one)
            case _:
                pass
        assert 0 <= store.num_bytes <= 100
        found = [store.peek(key(each)) for each in range(6)]
        rows = [each.rows for each in found if each is not None]
        assert store.counts == MediaCounts(len(rows), sum(r is not None for r in rows), store.num_bytes, 100)
        assert all(store.find(k) is not None for keys in pinned.values() for k in keys)
