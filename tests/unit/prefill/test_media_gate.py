"""Which prompts wait for embeddings, what is encoded next, and when an image is missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import InvalidRequest, NeedMedia
from baton.domain.ids import AttemptId, RequestId
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.media.store import HeldMedia, MediaStore
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
    ((_, item), _) = gate.next_batch()
    item.fault = "cannot be encoded"
    assert isinstance(gate.find_fault(one, 0), InvalidRequest)
    assert gate.find_fault(other, 0) is None


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
