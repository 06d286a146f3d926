"""What a token costs a decode worker beside its model: own Python calls, tasks, timers and CPU time.

    python -m bench.router.decode_host [--streams 1 8 64] [--list]

Scheduler, loop, outbox, attempts, session and codecs are the worker's own. The runner gives a token a row at once, and
the connection drops what is written. So counts do not depend on the machine, and a test bounds them. `engine`: a turn
of the engine's thread without the model; `emission`: from its effects to the frame, in the asyncio loop. Both run in
one thread here, in turns, so no time is spent waiting for the interpreter's lock.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rich.console import Console

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, RequestId, WorkerId, new_incarnation
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, StopParams
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch, StepOutput
from baton.engine.chunking import ChunkBudget
from baton.engine.mailbox import Mailbox
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.rpc.codec import encode_request
from baton.rpc.gen import session_pb2 as pb
from baton.services.decode.commands import DecodeCommand
from baton.services.decode.handoff_client import HandoffClient
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits, Reserved
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.outbox import DecodeOutbox
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.decode.serving.attempts import AttemptServer, ServicerConfig
from baton.services.decode.serving.sessions import serve_attempts
from baton.session.outbox import OutboxLimits
from baton.session.prompts import split_prompt
from baton.session.pump import SessionPump
from baton.session.session import ROUTER_KINDS, MessageSession, SessionLimits
from baton.session.tags import ConnectionKeys
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.request_validator import EngineRequestValidator
from baton.worker.sessions.served_streams import ServedStreams
from baton.worker.sessions.session_handlers import SessionHandlers
from baton.worker.streams import AttemptStreams
from bench.harness.signals import run_command
from bench.router.token_budget import WorkTotal, counting, function_name

STREAMS = (1, 8, 64)
NUM_STEPS, PAGE_SIZE, PROMPT_TOKENS = 128, 16, 16
LOOP_PASSES = 8
"""Passes of the asyncio loop after a turn; more than a frame needs."""
VOCAB_SIZE, MAX_MODEL_LEN = 1000, 4096
_FOREVER_S = 1e6
_TOKEN = (SampledToken(5),)


class InstantRunner:
    """A token a row, at once."""

    is_async = False

    def run(self, batch: Batch) -> StepOutput:
        """See `Runner`."""
        return StepOutput(tuple([() if row.sample is None else _TOKEN for row in batch.rows]))


@dataclass(slots=True)
class DroppingConnection:
    """A `DirectConnection`, as a socket's is, whose other end reads everything and says nothing."""

    wire: str = "socket"
    num_frames: int = 0
    num_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: pb.SessionMessage) -> None:
        """See `WireConnection`."""
        self.write(message)

    def write(self, message: pb.SessionMessage) -> bool:
        """See `DirectConnection`. Serialises, as a socket's end does."""
        self.num_bytes += len(message.SerializeToString())
        self.num_frames += 1
        return True

    def call_with_room(self, call: Callable[[], None]) -> None:
        """See `DirectConnection`. There is always room."""

    async def hand_over(self, take: Callable[[pb.SessionMessage], bool]) -> None:
        """See `DirectConnection`."""
        await self.ended.wait()

    async def receive(self) -> pb.SessionMessage | None:
        """See `WireConnection`."""
        await self.ended.wait()
        return None

    def close(self) -> None:
        """See `WireConnection`."""
        self.ended.set()


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Of one token: calls of own functions in the engine's turn and in the loop, tasks, timers, and seconds of CPU."""

    num_streams: int
    engine_calls: float
    emission_calls: float
    tasks: float
    timers: float
    frames_a_step: float
    engine_s: float
    emission_s: float
    functions: tuple[tuple[str, float], ...]


class DecodeHost:
    """A decode worker without a model, whose rows all belong to one router. Needs a running event loop."""

    def __init__(self, max_rows: int) -> None:
        self.mailbox: Mailbox[DecodeCommand] = Mailbox(4 * max_rows + 64)
        self.streams: AttemptStreams[Any] = AttemptStreams()
        self.connection = DroppingConnection()
        self._identity = WorkerId("decode-0"), new_incarnation()
        validator = EngineRequestValidator(VOCAB_SIZE, MAX_MODEL_LEN)
        handoffs = HandoffClient(cast(Any, None), self.mailbox, 1.0, validator)
        config = ServicerConfig(validator, _FOREVER_S, lambda: False, self._identity)
        attempts = AttemptServer(self.mailbox, self.streams, cast(Any, None), handoffs, config)
        self.outbox = DecodeOutbox(self.streams, handoffs, cast(Any, None), RecentAttempts())
        self.loop = self._make_loop(max_rows)
        self._pump = self._open_session()
        self.served = ServedStreams(self._pump, SessionHandlers(generate=serve_attempts(attempts)), MAX_MODEL_LEN)
        self._running = asyncio.create_task(self._pump.run(self.connection))

    def open(self, number: int, num_tokens: int) -> None:
        """Starts an attempt that this worker computes whole."""
        id = AttemptId(RequestId(f"r{number}"), 1)
        answer, _ = self._import_policy.reserve(id, PROMPT_TOKENS, [], 0.0, _FOREVER_S, num_tokens)
        assert isinstance(answer, Reserved), answer
        request = encode_request(EngineRequest(id, (), PROMPT_TOKENS, SamplingParams(), StopParams(num_tokens)))
        worker, incarnation = self._identity
        opened = pb.Open(
            request=request, reservation_id=answer.id, prefill_id=worker, prefill_incarnation=incarnation,
            deadline_s=60.0,
        )  # fmt: skip
        prompt = [(7 * number + position) % VOCAB_SIZE for position in range(PROMPT_TOKENS)]
        messages = [pb.StreamMessage(stream=number, open=opened)]
        messages += [pb.StreamMessage(stream=number, prompt=part) for part in split_prompt(prompt)]
        self.served.apply(messages)

    async def pass_loop(self) -> None:
        """Lets the asyncio loop deliver what a turn has emitted."""
        for _ in range(LOOP_PASSES):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Ends the session and its attempts."""
        self.served.on_ended("closed")
        self._pump.session.lose("the bench ends")
        self._pump.close()
        await self._running
        await self.pass_loop()

    def _open_session(self) -> SessionPump:
        now = asyncio.get_running_loop().time()
        limits = SessionLimits(ping_s=_FOREVER_S, silent_s=_FOREVER_S, outbox=OutboxLimits(window_bytes=1 << 30))
        session = MessageSession(1, ROUTER_KINDS, limits, now)
        session.connected(ConnectionKeys(b"sent", b"received"), 0, now)
        pump = SessionPump(session, lambda messages: None, lambda: None)
        pump.start()
        return pump

    def _make_loop(self, max_rows: int) -> DecodeLoop:
        num_pages = (2 + ceil_div(NUM_STEPS, PAGE_SIZE)) * 4 * max_rows
        cache = PrefixCache(PagePool(num_pages))
        limits = ImportLimits(PAGE_SIZE, max_rows, num_pages, _FOREVER_S, max_reservations=max_rows)
        imports = ImportTable(cache, limits)
        chunks = ChunkBudget(PROMPT_TOKENS * max_rows, PAGE_SIZE)
        scheduler = DecodeScheduler(imports, SwapSpace(0), PAGE_SIZE, chunks)
        checks = PageChecks(cache)
        faults = PageFaults(cache, imports, scheduler, checks, PAGE_SIZE, 1)
        rules = ImportRules(PAGE_SIZE, digests=False)
        self._import_policy = ImportPolicy(cache.pool, imports, scheduler, rules, faults)
        turn = EngineTurn(WorkerRole.DECODE, cache, self.mailbox, lambda: None)
        hooks = DecodeHooks(self.outbox.emit, lambda pull: None, PageScrub(checks, 1))
        return DecodeLoop(turn, imports, scheduler, self._import_policy, cast(Any, InstantRunner()), hooks)


async def measure(num_streams: int) -> HostBudget:
    """Counts `NUM_STEPS` steps of `num_streams` rows, then times as many."""
    host = DecodeHost(num_streams)
    for number in range(1, num_streams + 1):
        host.open(number, 3 * NUM_STEPS)
    await host.pass_loop()
    while host.loop.load().running_rows < num_streams or host.loop.load().waiting_tokens:
        if not host.streams:
            raise RuntimeError("an attempt ended before it was counted")
        await _step(host)
    loop = asyncio.get_running_loop()
    engine, emission, frames = WorkTotal(), WorkTotal(), host.connection.num_frames
    for _ in range(NUM_STEPS):
        with counting(loop, engine):
            host.loop.turn()
        with counting(loop, emission):
            await host.pass_loop()
    frames = host.connection.num_frames - frames
    spent = [0.0, 0.0]
    for _ in range(NUM_STEPS):
        for index, seconds in enumerate(await _step(host)):
            spent[index] += seconds
    assert host.loop.load().running_rows == num_streams
    await host.close()
    num_tokens = num_streams * NUM_STEPS
    return HostBudget(
        num_streams, engine.calls.total() / num_tokens, emission.calls.total() / num_tokens,
        (engine.num_tasks + emission.num_tasks) / num_tokens, (engine.num_timers + emission.num_timers) / num_tokens,
        frames / NUM_STEPS, spent[0] / num_tokens, spent[1] / num_tokens,
        _names(engine.calls + emission.calls, num_tokens),
    )  # fmt: skip


async def _step(host: DecodeHost) -> tuple[float, float]:
    """One turn, and what follows; seconds of CPU of both."""
    start = time.process_time()
    host.loop.turn()
    turned = time.process_time()
    await host.pass_loop()
    return turned - start, time.process_time() - turned


def _names(calls: Counter[Any], num_tokens: int) -> tuple[tuple[str, float], ...]:
    return tuple((function_name(code), count / num_tokens) for code, count in calls.most_common())


def host_costs(streams: Sequence[int] = STREAMS) -> list[HostBudget]:
    """The cost of a token at each number of streams."""
    return [asyncio.run(measure(num_streams)) for num_streams in streams]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--list", action="store_true", help="also list the functions")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    for cost in host_costs(options.streams):
        console.print(
            f"{cost.num_streams} streams, a token: {cost.engine_calls:.1f} + {cost.emission_calls:.1f} calls, "
            f"{cost.engine_s * 1e6:.1f} + {cost.emission_s * 1e6:.1f} us (engine + emission); {cost.tasks:.2f} tasks, "
            f"{cost.timers:.2f} timers; {cost.frames_a_step:.2f} frames a step",
            highlight=False,
        )
        for name, count in cost.functions if options.list else ():
            console.print(f"  {count:6.2f} {name}", highlight=False)


if __name__ == "__main__":
    run_command(main)
