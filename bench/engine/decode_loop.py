"""A decode worker's engine loop, turn by turn, with the real model: the share of a turn outside the forward pass.

Called by `bench.engine.steps` and `bench.engine.gpu`. Scheduler, imports, import policy, loop, runner and sampler are
the worker's own. Prompts are imported without a transfer, and the loop's effects go to an event loop in another thread,
as in a worker. The forward pass is the time of the model's `Decoder`; all other CPU time of the engine's thread is host
time.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import uvloop

from baton.domain.arithmetic import ceil_div
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId, WorkerId
from baton.domain.request import EngineRequest, SampledToken, StopParams
from baton.domain.worker import WorkerRole
from baton.engine.handoff.import_commands import FreeProbePages
from baton.engine.mailbox import Mailbox
from baton.engine.page_scrub import PageScrub
from baton.engine.runner import ModelRunner
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.model.decoders.base import Decoder
from baton.model.loading.loader import LoadedModel
from baton.model.storage import PageStorage
from baton.services.decode.commands import DecodeCommand
from baton.services.decode.effects import DecodeEffect, OutwardEffect
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits, Reserved, SealInfo
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.scheduler import DecodeScheduler
from baton.transfer.base import Pull, PullEvent, PullOutcome
from bench.engine.bench_engine import GREEDY, BenchEngine

WARMUP_TURNS = 2
_SOURCE = WorkerId("prefill-0")
_DEADLINE_S = 3600.0
_STOP_S = 10.0


def host_time_shares(engine: BenchEngine, sink: EffectSink, num_rows: int, context: int, num_turns: int) -> list[float]:
    """Host share of the CPU time of each of `num_turns` turns, with rows of `context` tokens at the start."""
    timed = _TimedModel(engine.model)
    runner = ModelRunner(cast(LoadedModel, timed), engine.storage)
    loop = make_decode_loop(engine, runner, sink, num_rows, context, num_turns)
    shares = []
    for turn in range(WARMUP_TURNS + num_turns):
        timed.forward_s, began_s = 0.0, time.thread_time()
        loop.turn()
        seconds = time.thread_time() - began_s
        if turn >= WARMUP_TURNS:
            shares.append((seconds - timed.forward_s) / seconds)
    return shares


def pages_needed(page_size: int, num_rows: int, context: int, num_turns: int) -> int:
    """Pages that `host_time_shares` needs."""
    return num_rows * ceil_div(context + WARMUP_TURNS + num_turns + 2, page_size)


class EffectSink:
    """The asyncio side of a worker: an event loop in a thread that counts the engine's effects. A context manager."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outside")
        self.num_effects = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()

    def emit(self, effects: list[OutwardEffect]) -> None:
        """Called from the engine's thread, like a worker's outbox."""
        self._loop.call_soon_threadsafe(self._count, effects)

    def count(self) -> int:
        """Number of effects, after all emitted ones have arrived. Raises `TimeoutError`."""

        async def read() -> int:
            return self.num_effects

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(_STOP_S)

    def _count(self, effects: list[OutwardEffect]) -> None:
        self.num_effects += len(effects)


class _TimedModel:
    """A loaded model whose decoders add up the CPU time of their forward passes. Delegates everything else to it."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.forward_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def decoder(self, storage: PageStorage) -> _TimedDecoder:
        return _TimedDecoder(self._model.decoder(storage), self._timer)

    @contextmanager
    def _timer(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.forward_s += time.thread_time() - began_s


class _TimedDecoder:
    """Times `forward`; delegates everything else to the decoder."""

    def __init__(self, decoder: Decoder, timer: Callable[[], Any]) -> None:
        self._decoder = decoder
        self._timer = timer

    def forward(self, *arguments: Any, **named: Any) -> Any:
        with self._timer():
            return self._decoder.forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def make_decode_loop(
    engine: BenchEngine,
    runner: ModelRunner,
    sink: EffectSink,
    num_rows: int,
    context: int,
    num_turns: int,
    overlaps: bool = False,
) -> DecodeLoop:
    """A loop with imported rows that run longer than the measurement."""
    page_size = engine.page_size
    cache = PrefixCache(PagePool(engine.num_pages))
    imports = ImportTable(cache, ImportLimits(page_size, num_rows, engine.num_pages, _DEADLINE_S))
    scheduler = DecodeScheduler(imports, SwapSpace(0), page_size)
    checks, page_bytes = PageChecks(cache), engine.model.geometry.page_bytes
    faults = PageFaults(cache, imports, scheduler, checks, page_size, page_bytes)
    import_policy = ImportPolicy(cache.pool, imports, scheduler, ImportRules(page_size, digests=True), faults)
    mailbox: Mailbox[DecodeCommand] = Mailbox(64)
    turn = EngineTurn(WorkerRole.DECODE, cache, mailbox, on_idle=lambda: None)
    hooks = DecodeHooks(sink.emit, _refuse_pull, PageScrub(checks, page_bytes), runner.start if overlaps else None)
    loop = DecodeLoop(turn, imports, scheduler, import_policy, runner, hooks)
    stop = StopParams(max_tokens=WARMUP_TURNS + num_turns + 2)
    rng = random.Random(engine.seed)
    for index in range(num_rows):
        tokens = tuple(rng.choices(range(4, engine.shape.vocab_size), k=context - 1))
        _import_request(
            import_policy,
            EngineRequest(AttemptId(RequestId(f"r{index}"), 1), tokens, len(tokens), GREEDY, stop),
            page_size,
        )
    mailbox.put(FreeProbePages(()))  # so that the first turn does not wait for a command
    return loop


def _import_request(import_policy: ImportPolicy, request: EngineRequest, page_size: int) -> None:
    """Imports one request, with every page read and valid."""
    answer, _ = import_policy.reserve(request.id, len(request.tokens), [], 0.0, _DEADLINE_S)
    assert isinstance(answer, Reserved), "the pool was to have room"
    import_policy.claim(answer.id, request, _SOURCE, _DEADLINE_S)
    pages = tuple(PageId(page) for page in range(ceil_div(len(request.tokens), page_size)))
    effects = import_policy.on_chunk(PublishedChunk(request.id, 0, pages, (0,) * len(pages)), 0.0)
    import_policy.on_seal(request.id, SealInfo(SampledToken(request.tokens[0]), None, len(pages)), 0.0)
    while effects:
        effects += _complete_pull(import_policy, effects.pop())


def _complete_pull(import_policy: ImportPolicy, effect: DecodeEffect) -> list[DecodeEffect]:
    if not isinstance(effect, Pull):
        return []
    return import_policy.on_pull_event(PullEvent(effect, PullOutcome.DONE, 1, 0.0), 0.0)


def _refuse_pull(pull: Pull) -> None:
    raise AssertionError("every import was over before the first turn")
