"""The engine thread as timers: the real engine loops, run when a command arrives or their timeout ends.

A turn happens at one instant. Its effects appear when the step would have ended, and the next turn begins then.
Used by `prefill` and `decode`. Knows no service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from baton.domain.request import SampledToken
from baton.engine.batch import Batch, SampleSpec, StepOutput
from baton.engine.fake_runner import FakeRunner
from baton.engine.mailbox import Mailbox
from baton.engine.media.step_inputs import EmbeddingSource
from baton.engine.thread import EngineLoop
from baton.grammar.matcher import MaskRow
from baton.kv.memory import PageMemory
from baton.kv.windows.slots import WindowSlots
from simulation.nodes.grammar import new_masks
from simulation.runtime.page_memory import SimPages
from simulation.runtime.process import SimProcess
from simulation.vision.images import see_images

Command = TypeVar("Command")

TURN_S = 0.0002


class EngineIdle(Exception):
    """The engine has nothing to do for `timeout_s` (None: until a command comes)."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s


class SimMailbox(Mailbox[Command]):
    """A mailbox whose reader does not wait: it raises `EngineIdle` instead. `on_command` receives taken commands."""

    def __init__(self, max_commands: int, on_command: Callable[[Command], None]) -> None:
        super().__init__(max_commands)
        self._on_command = on_command
        self.on_arrival: Callable[[], None] = lambda: None
        self.is_wait_over = False

    def end_wait(self, is_wait_over: bool) -> None:
        """True if the next empty `take` is the reader's timeout."""
        self.is_wait_over = is_wait_over

    def try_put(self, command: Command) -> bool:
        taken = super().try_put(command)
        self.on_arrival()
        return taken

    def put(self, command: Command) -> None:
        super().put(command)
        self.on_arrival()

    def take_all(self, timeout_s: float | None) -> list[Command]:
        commands = super().take_all(0.0)
        if not commands and timeout_s != 0.0 and not self.is_wait_over:
            raise EngineIdle(timeout_s)
        for command in commands:
            self._on_command(command)
        return commands


class SimRunner(FakeRunner):
    """The fake model in one of its versions; records whether it ran.

    `images`: embeddings for its rows, as `MediaStore.get` gives them; None: it computes no row of an image. `windows`:
    slots of window parts, which are overwritten while they are free.
    """

    has_run = False
    images: EmbeddingSource | None = None
    windows: WindowSlots | None = None

    def __init__(
        self, memory: SimPages, page_size: int, vocab_size: int, host: PageMemory | None = None, version: int = 0
    ) -> None:
        self.masks = new_masks()
        super().__init__(memory, page_size, vocab_size, host, self.masks)
        self._version = version

    def run(self, batch: Batch) -> StepOutput:
        self.has_run = True
        if any(row.media for row in batch.rows):
            batch = replace(batch, rows=tuple(see_images(row, self.images) for row in batch.rows))
        output = super().run(batch)
        if self.windows is not None and self._apart is not None:
            for slot in self.windows.free_slots:  # nothing may read it
                self._apart.windows.page(slot)[:] = b"\xff" * self._apart.windows.page_bytes
        return output

    def _sample(self, spec: SampleSpec, mask: MaskRow | None) -> SampledToken:
        sampling = replace(spec.sampling, seed=spec.sampling.seed + self._version)
        return super()._sample(replace(spec, sampling=sampling), mask)


class StepCheck:
    """The `runner` of an engine that runs no model: whether a turn had a step."""

    has_run = False

    def set(self) -> None:
        """The turn has a step."""
        self.has_run = True


class SimEngine:
    """Runs one loop. `check` is called after every turn; `on_crash` receives errors of the loop or the check."""

    def __init__(
        self,
        process: SimProcess,
        runner: SimRunner | StepCheck,
        is_wait_over: Callable[[bool], None],
        check: Callable[[], None],
        on_crash: Callable[[SimProcess, BaseException], None],
        mean_step_s: float,
    ) -> None:
        self._mean_step_s = mean_step_s
        self._process = process
        self._runner = runner
        self._end_wait = is_wait_over
        self._check = check
        self._on_crash = on_crash
        self._asyncio = asyncio.get_running_loop()
        self._loop: EngineLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at_s: float | None = None
        self._busy_until_s = 0.0
        self._is_turning = False
        self.step_s = 0.0

    def begin(self, loop: EngineLoop) -> None:
        """Starts the loop."""
        self._loop = loop
        self.wake()

    def wake(self) -> None:
        """Schedules a turn for a new command. During a turn it does nothing: another turn follows anyway."""
        if not self._is_turning:
            self._turn_at(self._asyncio.time())

    def step_age_s(self) -> float:
        """Age of the present step, as in a heartbeat."""
        process, now = self._process, self._asyncio.time()
        return now - process.hung_since_s if now < process.hung_until_s else 0.0

    def _turn_at(self, at_s: float) -> None:
        at_s = max(at_s, self._busy_until_s, self._process.hung_until_s, self._process.frozen_until_s)
        if self._timer is not None and not self._timer.cancelled() and self._timer.when() <= at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._asyncio.call_at(at_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now, process = self._asyncio.time(), self._process
        if not process.alive or self._loop is None:
            return
        if now < max(process.hung_until_s, process.frozen_until_s):
            self._turn_at(now)
            return
        self._end_wait(self._wake_at_s is not None and now >= self._wake_at_s)
        self._wake_at_s = None
        self._runner.has_run = False
        self.step_s = process.rng.expovariate(1.0 / self._mean_step_s)
        self._is_turning = True
        try:
            self._loop.turn()
            self._check()
        except EngineIdle as asleep:
            if asleep.timeout_s is not None:
                self._wake_at_s = now + asleep.timeout_s
                self._turn_at(self._wake_at_s)
            return
        except Exception as error:  # the engine's root: a broken invariant
            self._on_crash(process, error)
            return
        finally:
            self._is_turning = False
        self._busy_until_s = now + (self.step_s if self._runner.has_run else TURN_S)
        self._turn_at(self._busy_until_s)

    def after_step(self, call: Callable[[], None]) -> None:
        """Calls back when the present step has ended."""
        self._asyncio.call_later(self.step_s if self._runner.has_run else TURN_S, call)
