"""Fills window slots that no page has with NaN, so that a read of one that was given back shows in the tokens."""

from __future__ import annotations

from typing import Any

from baton.engine.batch import Batch, Runner, StepOutput
from baton.kv.windows.memory import WindowedMemory
from baton.kv.windows.slots import WindowSlots
from baton.services.local.pair import LocalPair


class PoisoningRunner:
    """A `Runner` that poisons free slots now and after every step; a step's copies to host memory may read them."""

    def __init__(self, runner: Runner, slots: WindowSlots, memory: WindowedMemory) -> None:
        self._runner = runner
        self._slots = slots
        self._memory = memory
        self._poison()

    def run(self, batch: Batch) -> StepOutput:
        output = self._runner.run(batch)
        self._poison()
        return output

    def _poison(self) -> None:
        for slot in self._slots.free_slots:
            self._memory.windows.page(slot)[:] = b"\xff" * self._memory.windows.page_bytes


def window_slots(loop: Any) -> WindowSlots:
    """The window slots of a loop's pool."""
    slots = loop._turn.cache.pool.windows
    assert isinstance(slots, WindowSlots)
    return slots


def poison_free_slots(pair: LocalPair) -> None:
    """Poisons the free slots of both pools from now on."""
    sides: list[tuple[Any, object]] = [(pair.prefill, pair.prefill_memory), (pair.decode, pair.decode_memory)]
    for loop, memory in sides:
        assert isinstance(memory, WindowedMemory)
        loop._runner = PoisoningRunner(loop._runner, window_slots(loop), memory)
