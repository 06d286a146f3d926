"""A simulated encode worker, wired as `baton.services.encode.app._Worker` wires it.

Real: loop, scheduler, servicer, receiver, store, registration. Simulated: threads, sockets, decoder, tower.
`_record` mirrors the method of the same name there, and `leave` the end of `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from random import Random
from typing import Any, cast

from baton.domain.ids import WorkerId
from baton.domain.worker import IMAGE, TEXT, WorkerRecord, WorkerRole
from baton.rpc.gen import encode_pb2, encode_pb2_grpc
from baton.services.encode.commands import EncodeCommand
from baton.services.encode.loop import EncodeLoop
from baton.services.encode.server import EncodeServicer
from baton.worker.budget_control import BudgetChange
from baton.worker.registration import Registration
from simulation.checks.invariants import Violation
from simulation.nodes.engine import SimEngine, SimMailbox, StepCheck
from simulation.nodes.environment import SimEnvironment
from simulation.nodes.state_store import SimStore
from simulation.policies import CONFIG, MODEL
from simulation.runtime.grpc_calls import SimServer
from simulation.runtime.network import Endpoint
from simulation.runtime.process import SimProcess
from simulation.scenario import FAULTS_END_S, VOCAB_SIZE
from simulation.vision.images import PROCESSOR
from simulation.vision.worker import FINGERPRINT, SimWorkerVision

SERVER_GRACE_S = 1.0
"""Copied from `baton.services.encode.app`, which would import the model."""


class _SimEncodeServicer(EncodeServicer):
    """Flips a bit of some parts of embeddings, behind all that the source checks."""

    corruption = 0.0
    rng: Random

    async def PullEmbedding(
        self, request: encode_pb2.PullEmbeddingRequest, context: Any
    ) -> AsyncGenerator[encode_pb2.EmbeddingPart, None]:
        async with aclosing(super().PullEmbedding(request, context)) as parts:
            async for part in parts:
                if part.data and self.rng.random() < self.corruption:
                    part.data = bytes(_flip_bit(self.rng, bytearray(part.data)))
                yield part


class SimEncode:
    """One life of one encode worker. Created inside its own process."""

    def __init__(self, process: SimProcess, environment: SimEnvironment) -> None:
        network, policies, scenario = environment.network, environment.policies, environment.scenario
        self.process = process
        self._network = network
        self._lifecycle = policies.lifecycle(asyncio.Event())
        self._mailbox: SimMailbox[EncodeCommand] = SimMailbox(1024, lambda command: None)
        mark = StepCheck()
        self._vision = SimWorkerVision(process, environment, self._mailbox.try_put, mark.set, exports=True)
        self._scheduler = policies.encode_scheduler(self._vision.store, CONFIG.encode_budget_rows)
        self._loop = EncodeLoop(self._mailbox, self._scheduler, self._vision.encoder, self._lifecycle.on_idle)
        self._engine = SimEngine(
            process, mark, self._mailbox.end_wait, self._vision.check, environment.on_crash, scenario.mean_step_s
        )
        self._mailbox.on_arrival = self._engine.wake
        sim_store = SimStore(environment.store_server, network, process, CONFIG.heartbeat_s)
        self._registration = Registration(sim_store, self._record, CONFIG.heartbeat_s, lambda _: process.kill())
        self._listen(scenario.noise.embedding_corruption)
        self._engine.begin(self._loop)
        process.spawn(self._registration.run(), "background")

    async def leave(self) -> None:
        """SIGTERM; returns when the process would exit."""
        await self._lifecycle.drain(self._registration.announce, lambda: self._loop.num_requests, CONFIG.drain_s)
        await self._listener.stop(SERVER_GRACE_S)
        await self._registration.withdraw()

    async def change_budgets(self, change: BudgetChange | None) -> None:
        """It has none. The scenario changes those of others."""
        raise Violation("crash", f"{self.process.name} has no budgets")

    def check_idle(self) -> None:
        """Raises `Violation` if anything is left behind."""
        left = {
            "leases": self._scheduler.num_leases,
            "waiting images": self._scheduler.num_waiting,
            "pulls": self._servicer.num_pulls,
            **self._vision.left(),
        }
        found = {what: count for what, count in left.items() if count}
        if found:
            raise Violation("I5", f"{self.process.name} is idle and has left: {found}")

    def rot(self, rng: Random) -> list[int]:
        """Flips a bit of an embedding that is held; returns its place among them."""
        made = [item.rows.data for item in self._vision.store._held.values() if item.rows is not None]
        if not made:
            return []
        place = rng.randrange(len(made))
        _flip_bit(rng, made[place])
        return [place]

    def _listen(self, corruption: float) -> None:
        server = SimServer()
        self._servicer = _SimEncodeServicer(
            self._mailbox, self._vision.receiver, FINGERPRINT, lambda: self._lifecycle.draining
        )
        self._servicer.corruption, self._servicer.rng = corruption, self.process.rng
        if asyncio.get_running_loop().time() < FAULTS_END_S:
            asyncio.get_running_loop().call_at(FAULTS_END_S, setattr, self._servicer, "corruption", 0.0)
        else:
            self._servicer.corruption = 0.0
        encode_pb2_grpc.add_EncodeServicer_to_server(self._servicer, cast(Any, server))
        self._listener = self._network.hosts[self.process.name] = Endpoint(self.process, server.handlers)

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=WorkerId(self.process.name),
            role=WorkerRole.ENCODE,
            incarnation=self.process.incarnation,
            address=self.process.name,
            model=MODEL,
            fingerprint="",
            page_size=0,
            max_model_len=CONFIG.max_model_len,
            vocab_size=VOCAB_SIZE,
            status=self._lifecycle.status,
            load=replace(self._loop.load(), step_age_s=self._engine.step_age_s()),
            modalities=(TEXT, IMAGE),
            processor=PROCESSOR,
            vision=FINGERPRINT,
        )


def _flip_bit(rng: Random, data: bytearray) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data
