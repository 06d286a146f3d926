"""The images of one simulated worker. Real: receiver, puller, store, encoder. Faked: decoder, image processor, tower.

Used by `nodes.prefill` and `nodes.encode`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, cast

import torch

from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import EMBEDDINGS, NO_TOWER
from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.encoder import MediaEncoder
from baton.engine.media.store import MediaStore
from baton.model.vision.embedding import MediaEmbedding
from baton.model.vision.image_processor import PreparedImage
from baton.model.vision.tower import VisionTower
from baton.worker.media.embedding_puller import EmbeddingPuller, EncoderRegistry
from baton.worker.media.image_decoder import ImageDecoder, RgbImage
from baton.worker.media.media_receiver import MediaCommand, MediaLimits
from simulation.checks.invariants import Violation
from simulation.nodes.environment import SimEnvironment
from simulation.nodes.state_store import SimStore
from simulation.policies import CONFIG
from simulation.runtime.grpc_calls import SimChannels
from simulation.runtime.process import SimProcess
from simulation.scenario import ImagePlan
from simulation.vision.images import PROCESSOR, image_identity, read_image, row_value

FORMAT = EmbeddingFormat(hidden=1, depth=0, dtype="int32")
FINGERPRINT = "7" * 32
"""Of the embeddings: all versions of the model have one tower."""

MEAN_DECODE_S = 0.01
MAX_OPEN_BYTES = 64


class SimTower:
    """Calls `on_step` for every image, so that its step takes time."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def encode(self, inputs: Mapping[str, torch.Tensor], num_rows: Sequence[int]) -> list[MediaEmbedding]:
        """As `VisionTower`."""
        self._on_step()
        number, rows = inputs["pixels"].tolist()
        identity = image_identity(ImagePlan(0, number, rows))
        return [MediaEmbedding(torch.tensor([[row_value(identity, row)] for row in range(rows)], dtype=torch.int32))]


class _SimDecoder:
    def __init__(self, process: SimProcess) -> None:
        self._rng = process.rng

    async def decode(self, data: bytes) -> RgbImage:
        await asyncio.sleep(self._rng.expovariate(1 / MEAN_DECODE_S))
        return RgbImage(*read_image(data), b"")


class _SimProcessor:
    def prepare(self, width: int, height: int, pixels: bytes, detail: str = "") -> PreparedImage:
        return PreparedImage({"pixels": torch.tensor([width, height], dtype=torch.int32)}, height, None)


class SimWorkerVision:
    """The store of images, what encodes them, and what receives them. Created inside the worker's own process."""

    def __init__(
        self,
        process: SimProcess,
        environment: SimEnvironment,
        send: Callable[[MediaCommand], bool],
        on_step: Callable[[], None],
        *,
        exports: bool,
    ) -> None:
        """`send`: to the engine's mailbox. `exports`: embeddings are for other workers."""
        scenario = environment.scenario
        self.store: MediaStore[Any, Any] = MediaStore(scenario.media_bytes)
        self._name = process.name
        tower = cast(VisionTower, SimTower(on_step))
        self.encoder = MediaEncoder(tower, self.store, FORMAT.to_bytes) if exports else MediaEncoder(tower, self.store)
        limits = MediaLimits(CONFIG.max_model_len, CONFIG.max_model_len, scenario.media_bytes, MAX_OPEN_BYTES)
        self.receiver = environment.policies.media_receiver(
            cast(Any, _SimProcessor()), PROCESSOR, FORMAT.row_bytes, cast(ImageDecoder, _SimDecoder(process)), limits,
            send,
        )  # fmt: skip
        self.capabilities: list[str] = []
        if not exports:
            self.capabilities += [EMBEDDINGS] * bool(scenario.num_encoders) + [NO_TOWER] * (not scenario.towers)
            self.receiver.has_tower = scenario.towers
            self.receiver.puller = self._make_puller(process, environment) if scenario.num_encoders else None

    @staticmethod
    def _make_puller(process: SimProcess, environment: SimEnvironment) -> EmbeddingPuller:
        registry = SimStore(environment.store_server, environment.network, process, CONFIG.heartbeat_s)
        channels = SimChannels(environment.network, process)
        encoders = EncoderRegistry(registry, OPEN_CLUSTER)
        return EmbeddingPuller(encoders, channels, FORMAT, FINGERPRINT, torch.device("cpu"))

    def check(self) -> None:
        """Raises `Violation` if the store counts other bytes than it holds, or more than it may hold."""
        held = list(self.store._held.values())
        num_bytes = sum(item.num_bytes for item in held)
        if num_bytes != self.store.num_bytes or num_bytes > self.store.max_bytes:
            message = f"{self._name}: images of {num_bytes} bytes, counted {self.store.num_bytes}"
            raise Violation("I5", f"{message}, of {self.store.max_bytes}")

    def rot(self, rng: Random) -> None:
        """Flips a bit of one held embedding, of a worker that computes with them."""
        made = [item.rows for item in self.store._held.values() if item.rows is not None]
        if made:
            data = rng.choice(made).layers.view(torch.uint8).flatten()
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def left(self) -> dict[str, int]:
        """What an idle worker must not have, by name."""
        pins = sum(len(item.pins) for item in self.store._held.values())
        return {"pins of images": pins, "bytes of uploads": self.receiver._open_bytes}
