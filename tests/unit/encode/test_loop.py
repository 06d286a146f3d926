"""An encode worker's loop tells what waits and what it holds."""

from typing import Any

import torch

from baton.domain.worker import Activity, MediaCounts
from baton.engine.mailbox import Mailbox
from baton.engine.media.encoder import MediaEncoder
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.store import HeldMedia, MediaStore
from baton.engine.reply import Reply
from baton.services.encode.commands import EncodeCommand
from baton.services.encode.loop import EncodeLoop
from baton.services.encode.scheduler import EncodeScheduler
from baton.telemetry import metrics
from baton.worker.media.media_receiver import HoldMedia
from tests.unit.encode.encode_world import FORMAT, NUM_ROWS, AddingTower

INPUT_BYTES = 40


def image(value: float) -> HeldMedia[Any, ExportedEmbedding]:
    return HeldMedia({"pixels": torch.tensor([value])}, NUM_ROWS, None, INPUT_BYTES, NUM_ROWS * FORMAT.row_bytes)


def value_of(metric: Any) -> float:
    return float(metric._value.get())


async def test_a_turn_tells_images_that_wait_and_those_that_are_held():
    mailbox: Mailbox[EncodeCommand] = Mailbox(8)
    store = MediaStore[Any, ExportedEmbedding](1 << 20)
    encoder = MediaEncoder(AddingTower(FORMAT), store, FORMAT.to_bytes)  # type: ignore[arg-type]
    idle: list[None] = []
    loop = EncodeLoop(mailbox, EncodeScheduler(store, 2 * NUM_ROWS), encoder, lambda: idle.append(None))
    waiting, steps = metrics.WAITING_REQUESTS.labels("encode"), metrics.STEP_SECONDS.labels("encode")
    num_steps = sum(steps.counts)
    for number in range(3):
        mailbox.put(HoldMedia(("s", bytes([number])), image(number), Reply()))
    assert loop.turn()
    assert value_of(waiting) == loop.load().waiting_requests == loop.num_requests == 1
    assert value_of(metrics.MEDIA_HELD) == 3
    assert value_of(metrics.MEDIA_HELD_BYTES) == 3 * NUM_ROWS * FORMAT.row_bytes + INPUT_BYTES
    row_bytes = NUM_ROWS * FORMAT.row_bytes
    assert loop.load().media == MediaCounts(3, 2, 3 * row_bytes + INPUT_BYTES, 1 << 20)
    assert loop.load().activity == Activity(2 * NUM_ROWS)
    assert not idle
    assert loop.turn()
    assert loop.load().media == MediaCounts(3, 3, 3 * row_bytes, 1 << 20)
    assert value_of(waiting) == 0
    assert value_of(metrics.MEDIA_HELD_BYTES) == 3 * NUM_ROWS * FORMAT.row_bytes
    assert sum(steps.counts) == num_steps + 2
    assert idle
