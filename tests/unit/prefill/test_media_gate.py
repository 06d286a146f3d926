"""Which prompts wait for embeddings, what is encoded next, and when an image is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import Broken, InvalidRequest, NeedMedia
from baton.domain.ids import AttemptId, RequestId
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.media.store import KEEP_S, HeldMedia, MediaKey, MediaStore
from baton.services.prefill.media_gate import MediaGate

ROWS = 4


def identity(number: int) -> bytes:
    return number.to_bytes(16)


def request(name: str, *images: int, salt: str = "") -> EngineRequest:
    """Two tokens of text before each image and behind the last."""
    spans = tuple(MediaSpan(2 + at * (ROWS + 2), ROWS, identity(image)) for at, image in enumerate(images))
    tokens = tuple(range((len(images) + 1) * 2 + len(images) * ROWS))
    id = AttemptId(RequestId(name), 1)
    return EngineRequest(id, tokens, len(tokens), SamplingParams(), StopParams(1), salt=salt, media=spans)


def prompts_of(*requests: EngineRequest) -> list[Any]:
    return [Mock(request=one, num_known=0) for one in requests]


def gate_with(*images: int, budget: int = 2 * ROWS, salt: str = "") -> MediaGate:
    store: MediaStore[str, str] = MediaStore(1000)
    for image in images:
        store.hold((salt, identity(image)), HeldMedia("pixels", ROWS, None, 8, 8))
    return MediaGate(store, budget)


def encode(gate: MediaGate) -> list[int]:
    batch = gate.next_batch()
    for key, _ in batch:
        gate.store.on_encoded(key, "rows")
    return [int.from_bytes(key[1]) for key, _ in batch]


def test_a_prompt_of_text_never_waits():
    gate = gate_with()
    assert gate.begin(request("text"), 0) is None
    assert not gate.must_wait(request("text"), 0)


def test_a_prompt_waits_until_all_its_images_are_encoded():
    gate, one = gate_with(1, 2, 3), request("a", 1, 2, 3)
    assert gate.begin(one, 0) is None
    assert gate.must_wait(one, 0)
    assert encode(gate) == [1, 2], "two images fill the budget"
    assert gate.must_wait(one, 0)
    assert encode(gate) == [3]
    assert not gate.must_wait(one, 0)
    assert encode(gate) == []


def test_rows_in_cached_pages_need_no_image():
    gate, one = gate_with(2), request("a", 1, 2)
    missing = gate.begin(one, 0)
    assert isinstance(missing, NeedMedia)
    assert missing.identities == (identity(1),)
    gate.end(one.id)
    behind_the_first = one.media[0].end
    assert gate.begin(one, behind_the_first) is None
    assert gate.must_wait(one, behind_the_first)
    assert encode(gate) == [2]
    assert isinstance(gate.find_fault(one, behind_the_first - 1), NeedMedia), "its pages were evicted meanwhile"


def test_without_a_store_no_prompt_waits():
    gate = MediaGate(MediaStore(0), 0, is_used=False)
    assert gate.begin(request("a", 1), 0) is None
    assert gate.find_fault(request("a", 1), 0) is None
    assert not gate.must_wait(request("a", 1), 0)


def test_another_salt_does_not_find_an_image():
    gate = gate_with(1, salt="a")
    assert gate.begin(request("a", 1, salt="a"), 0) is None
    assert isinstance(gate.begin(request("b", 1, salt="b"), 0), NeedMedia)


def test_an_image_larger_than_the_budget_is_encoded_alone():
    gate, one = gate_with(1, 2, budget=1), request("a", 1, 2)
    gate.begin(one, 0)
    gate.must_wait(one, 0)
    assert [encode(gate), encode(gate)] == [[1], [2]]


def test_a_fault_of_the_tower_ends_the_prompts_that_need_the_image():
    gate, one, other = gate_with(1, 2), request("a", 1), request("b", 2)
    for prompt in (one, other):
        gate.begin(prompt, 0)
        gate.must_wait(prompt, 0)
    ((key, _), _) = gate.next_batch()
    gate.on_failed(key, Broken("cannot be encoded now"))
    assert [(id, type(fault)) for id, fault in gate.faults(prompts_of(one, other))] == [(one.id, Broken)]
    gate.end(one.id)
    again = replace(one, id=AttemptId(one.id.request_id, 2))
    assert isinstance(gate.begin(again, 0), NeedMedia), "the image was dropped, and may be sent again"
    gate.store.hold(key, HeldMedia("pixels", ROWS, None, 8, 8))
    gate.end(again.id)
    assert gate.begin(again, 0) is None


def test_a_fault_ends_no_prompt_with_the_rows_in_cached_pages():
    gate, one = gate_with(1), request("a", 1)
    gate.begin(one, one.media[0].end)
    gate.on_failed(("", identity(1)), Broken("cannot be encoded now"))
    (prompt,) = prompts_of(one)
    prompt.num_known = one.media[0].end
    assert gate.faults([prompt]) == []


def test_images_that_never_fit_together_are_refused():
    """16 bytes each with their inputs, in a store of 40."""
    gate = MediaGate(MediaStore(40), 2 * ROWS)
    assert isinstance(gate.begin(request("nothing is known yet", 1, 2, 3), 0), NeedMedia)
    gate.end(request("nothing is known yet").id)
    for image in (1, 2):
        gate.store.hold(("", identity(image)), HeldMedia("pixels", ROWS, None, 8, 8))
    assert isinstance(gate.begin(request("three", 1, 2, 3), 0), InvalidRequest)
    assert isinstance(gate.begin(request("two", 2, 3), 0), NeedMedia)
    three = request("cached", 1, 2, 3)
    assert gate.begin(three, three.media[2].end) is None, "no image is needed"


def test_images_are_kept_until_their_prompt_comes():
    gate, one = gate_with(1, 2), request("a", 1, 2)
    store = gate.store
    store.max_bytes = 32
    for image in (1, 2):
        store.keep(("", identity(image)), 0.0)
    other: tuple[MediaKey, HeldMedia[Any, Any]] = ("", identity(3)), HeldMedia("pixels", ROWS, None, 8, 8)
    assert not store.hold(*other, 1.0)
    assert gate.begin(one, 0) is None
    assert not store.hold(*other, KEEP_S), "its pins go on"
    gate.end(one.id)
    assert store.hold(*other, 1.0), "they are not kept for another prompt"


def test_a_prompt_that_lacks_an_image_leaves_the_others_kept():
    gate = gate_with(1)
    gate.store.max_bytes = 32
    gate.store.keep(("", identity(1)), 0.0)
    assert isinstance(gate.begin(request("a", 1, 2), 0), NeedMedia)
    gate.end(request("a").id)
    assert not gate.store.hold(("", identity(3)), HeldMedia("pixels", ROWS, None, 16, 8), 1.0)


def test_an_image_that_came_after_its_prompt_is_pinned_before_it_is_used():
    """Its rows lay in cached pages at first. Then the pages went, and it came for another prompt."""
    gate, one = gate_with(), request("a", 1)
    key = ("", identity(1))
    assert gate.begin(one, one.media[0].end) is None
    gate.store.hold(key, HeldMedia(None, ROWS, None, 0, 8, "rows"))
    assert not gate.must_wait(one, 0)
    gate.store.max_bytes = 8
    assert not gate.store.hold(("", identity(2)), HeldMedia("pixels", ROWS, None, 0, 8))
    gate.end(one.id)
    assert gate.store.hold(("", identity(2)), HeldMedia("pixels", ROWS, None, 0, 8))


def test_spans_beyond_the_rows_of_an_image_are_refused():
    gate = gate_with()
    gate.store.hold(("", identity(1)), HeldMedia("pixels", ROWS - 1, None, 8, 8))
    assert isinstance(gate.begin(request("a", 1), 0), InvalidRequest)


def test_a_cancelled_prompt_gives_up_its_place_and_its_pins():
    gate, one, other = gate_with(1, 2), request("a", 1, 2), request("b", 2)
    for prompt in (one, other):
        gate.begin(prompt, 0)
        gate.must_wait(prompt, 0)
    gate.end(one.id)
    gate.end(one.id)
    assert encode(gate) == [2], "the other prompt's image"
    gate.end(other.id)
    assert gate.num_wanted == 0
    held = [gate.store.find(("", identity(n))) for n in (1, 2)]
    assert all(item is not None and not item.pins for item in held)


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True), min_size=1, max_size=6))
def test_every_prompt_gets_its_rows_in_the_order_of_need(prompts: list[list[int]]):
    """Each step has at most the budget, or one image; no image is encoded twice, and none that nobody needs."""
    gate = gate_with(*range(1, 7))
    requests = [request(f"r{number}", *images) for number, images in enumerate(prompts)]
    for one in requests:
        assert gate.begin(one, 0) is None
    waiting, encoded = list(requests), list[int]()
    for _ in range(7):
        waiting = [one for one in waiting if gate.must_wait(one, 0)]
        step = encode(gate)
        assert len(step) <= 2
        encoded += step
    assert not waiting
    assert encoded == list(dict.fromkeys(image for images in prompts for image in images))


def test_the_load_is_no_use_of_an_image():
    gate, one = gate_with(1, 2), request("a", 1)
    gate.begin(one, 0)
    assert gate.must_wait(one, 0)
    assert gate.store.find(("", identity(2))) is not None
    assert gate.num_wanted_rows == ROWS
    gate.end(one.id)
    gate.store.max_bytes = 32
    assert gate.store.hold(("", identity(3)), HeldMedia("pixels", ROWS, None, 8, 8))
    assert gate.store.peek(("", identity(1))) is None, "the least recently used one goes"


def test_a_step_is_time_of_the_prompts_that_wait_for_its_images():
    gate, both, late = gate_with(1, 2, 3), request("both", 1, 2, 3), request("late", 3)
    shown = request("shown", 1)
    for one in (both, late, shown):
        gate.begin(one, 0)
    for one in (both, late):
        assert gate.must_wait(one, 0)
    assert gate.num_wanted_rows == 3 * ROWS
    assert encode(gate) == [1, 2]
    gate.on_encoded(0.25)
    assert gate.num_wanted_rows == ROWS
    assert encode(gate) == [3]
    gate.on_encoded(0.5)
    gate.on_encoded(9.0)
    assert [gate.end(one.id) for one in (both, late, shown, both)] == [0.75, 0.5, 0.0, 0.0]
