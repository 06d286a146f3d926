"""An embedding that changes in a prefill worker's memory is used by no step: its prompts end, to come again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from baton.domain.errors import NeedMedia
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest
from baton.domain.worker import WorkerRole
from baton.engine.batch import Row
from baton.engine.handoff.export_events import Seal
from baton.engine.mailbox import Mailbox
from baton.engine.media.exported_embedding import PART_BYTES
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.engine.media.store import HeldMedia, MediaStore
from baton.engine.messages import Fail
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.model.vision.embedding import MediaEmbedding
from baton.services.prefill.commands import AddPrompt, PrefillCommand, PrefillEvent
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.media_gate import MediaGate
from baton.telemetry import metrics
from tests.tiny_workers import PAGE_BYTES, PAGE_SIZE, engine_request, tiny_prefill

RED, BLUE = b"r" * 16, b"b" * 16
ROWS = 4


@dataclass
class Worker:
    """A prefill loop without its thread, which computes one page a step."""

    events: list[PrefillEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.world = tiny_prefill(9.0, PAGE_SIZE)
        self.mailbox: Mailbox[PrefillCommand] = Mailbox(16)
        turn = EngineTurn(WorkerRole.PREFILL, world.cache, self.mailbox, on_idle=lambda: None)
        scrub = PageScrub(PageChecks(world.cache), PAGE_BYTES)
        self.loop = PrefillLoop(turn, world.scheduler, world.exports, world.runner, scrub, self.events.extend)
        self.store: MediaStore[Any, SettledEmbedding] = MediaStore(1000)
        world.scheduler.media = MediaGate(self.store, ROWS)

    def hold(self, identity: bytes, salt: str = "") -> SettledEmbedding:
        rows = SettledEmbedding.settle(MediaEmbedding(torch.randn(ROWS, 2)))
        assert self.store.hold((salt, identity), HeldMedia(None, ROWS, None, 0, rows.layers.nbytes, rows))
        return rows

    def add(self, request: EngineRequest) -> None:
        self.mailbox.put(AddPrompt(request, 0, 60.0, 0.0))

    def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            assert self.loop.turn()

    def ends(self) -> dict[str, Any]:
        """What became of each prompt: True if it was sealed, else its error."""
        sealed = {event.id.request_id: True for event in self.events if isinstance(event, Seal)}
        return sealed | {event.id.request_id: event.error for event in self.events if isinstance(event, Fail)}


def shows(name: str, identity: bytes, first: int = 1, salt: str = "") -> EngineRequest:
    """Eight tokens, of which those from `first` on are the rows of an image."""
    request = engine_request(name, [0, 1, 1, 0, 1, 0, 1, 1], salt=salt)
    return replace(request, media=(MediaSpan(first, ROWS, identity),))


def num_failures() -> float:
    return metrics.INTEGRITY_FAILURES_TOTAL.labels("embedding")._value.get()


def test_an_embedding_that_rots_before_its_first_step_is_not_used():
    worker, before = Worker(), num_failures()
    worker.hold(RED).rows[2, 0] += 1
    worker.add(shows("a", RED))
    worker.turn(2)
    error = worker.ends()["a"]
    assert isinstance(error, NeedMedia)
    assert error.identities == (RED,)
    assert (worker.store.peek(("", RED)), num_failures() - before) == (None, 1)
    assert worker.world.scheduler.num_chunking == 0
    worker.hold(RED)  # the router has sent it again
    worker.add(replace(shows("a", RED), id=replace(shows("a", RED).id, attempt=2)))
    worker.turn(5)
    assert [type(event) for event in worker.events if isinstance(event, (Seal, Fail))] == [Fail, Seal]


def test_one_that_rots_between_two_steps_is_not_used_further():
    """Steps are pages of two tokens: the first two show rows 0 to 2, the third one the last row."""
    worker = Worker()
    rows = worker.hold(RED)
    worker.add(shows("a", RED))
    worker.turn(2)
    assert not worker.ends()
    rows.rows[3, 1] += 1
    worker.turn(1)
    assert isinstance(worker.ends()["a"], NeedMedia)


def test_rows_that_no_later_step_shows_end_no_prompt():
    worker = Worker()
    rows = worker.hold(RED)
    worker.add(shows("a", RED))
    worker.turn(3)
    rows.rows[0, 0] += 1
    worker.turn(1)
    assert worker.ends() == {"a": True}


def test_prompts_of_other_images_go_on_in_the_same_step():
    worker = Worker()
    worker.world.scheduler.change_token_budget(32)
    worker.hold(RED).rows[0, 0] += 1
    worker.hold(BLUE)
    worker.add(shows("red", RED))
    worker.add(shows("blue", BLUE))
    worker.turn(1)
    ends = worker.ends()
    assert ends["blue"] is True
    assert isinstance(ends["red"], NeedMedia)


def test_all_prompts_of_a_step_that_show_it_end():
    """The one that showed intact rows, too: the image is gone before the step runs."""
    worker = Worker()
    worker.world.scheduler.change_token_budget(32)
    worker.hold(RED).rows[0, 0] += 1
    for name, first in (("a", 1), ("b", 2)):
        worker.add(shows(name, RED, first))
    metrics.MEDIA_HELD.set(1)
    metrics.MEDIA_HELD_BYTES.set(worker.store.num_bytes)
    worker.turn(1)
    assert [type(error) for error in worker.ends().values()] == [NeedMedia, NeedMedia]
    assert len(worker.store) == metrics.MEDIA_HELD._value.get() == metrics.MEDIA_HELD_BYTES._value.get() == 0


def test_a_prompt_that_waits_for_a_damaged_image_ends_with_the_next_turn():
    """It was pinned by a prompt that waits: the damage of one step is no reason to hang for another."""
    worker = Worker()
    worker.hold(RED).rows[0, 0] += 1
    for name in ("a", "b", "c"):
        worker.add(shows(name, RED))
    worker.turn(2)
    assert [type(worker.ends().get(name)) for name in "abc"] == [NeedMedia] * 3


def test_an_intact_copy_of_another_salt_serves():
    """Rows do not depend on the salt: only the damaged copy is forgotten."""
    worker = Worker()
    worker.world.scheduler.change_token_budget(32)
    held = [worker.hold(RED, "x"), worker.hold(RED, "y")]
    for name, salt in (("x", "x"), ("y", "y")):
        worker.add(shows(name, RED, salt=salt))
    damaged = worker.store.get(RED)  # the one that a step would find first
    assert damaged is not None
    damaged.rows[1, 1] += 1
    worker.turn(1)
    assert worker.ends() == {"x": True, "y": True}
    assert [one is damaged for one in held] == [one is not worker.store.get(RED) for one in held]
    assert len(worker.store) == 1


def test_a_row_whose_image_another_row_has_lost_ends_too():
    """Rows of 512 KiB: two to a part. The first prompt of the step shows intact ones, the second one damaged ones."""
    store: MediaStore[Any, SettledEmbedding] = MediaStore(4 * PART_BYTES)
    rows = SettledEmbedding.settle(MediaEmbedding(torch.randn(ROWS, PART_BYTES // 8)))
    store.hold(("", RED), HeldMedia(None, ROWS, None, 0, rows.layers.nbytes, rows))
    gate = MediaGate(store, ROWS)
    rows.rows[0, 0] += 1
    requests = [shows("later", RED), shows("sooner", RED)]
    step = [
        Row(one.id, one.tokens[start:end], start, (), None, None, media=one.media)
        for one, (start, end) in zip(requests, ((3, 5), (0, 3)), strict=True)
    ]
    assert gate.check(step[:1]) == []
    assert [id for id, _ in gate.check(step)] == [requests[1].id, requests[0].id]
    assert gate.num_damaged == 1
