"""`baton replay ID`: computes a stored request again on the workers, and compares token for token.

Parses the stored body as a router does, and runs each sequence through the real dispatcher and protocol. Reads the
state store and writes into a memory store of its own, so the stored request stays as it is.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Annotated

import structlog
from cyclopts import Parameter

from baton.domain.errors import BatonError, NoWorkers
from baton.domain.ids import RequestId, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.services.cli.settings import COMMANDS, ReplaySettings
from baton.services.router.app import RunningBackend, open_backend
from baton.services.router.generation import SequenceSpec
from baton.services.router.limits import DEFAULT_CONTEXT_TOKENS
from baton.services.router.openai.fields import parse_object
from baton.services.router.openai.images.parts import checked_images
from baton.services.router.openai.prompts import has_images
from baton.services.router.openai.request_parser import RequestParser
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.openai.validation import RequestValidator
from baton.services.router.settings import RouterSettings
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.stored_call import raw_request_of
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel, read_image_model
from baton.settings.base import refuse_unknown_variables
from baton.settings.model_source import ModelFiles, resolve_model
from baton.settings.trust import read_trust
from baton.store.connect import connect
from baton.store.media.redis_media_file_store import connect_media
from baton.store.memory_store import MemoryStore
from baton.store.store import CallRecord, SequenceRecord, StateStore, StoreUnavailable, WorkerRegistry
from baton.telemetry.request_timer import RequestOrigin, RequestTimer

EXIT_DIFFERENT = 1


class NotReplayable(BatonError):
    """The store lacks what is needed to compute the request again, or no worker can."""

    code = "not_replayable"


@dataclass(frozen=True, slots=True)
class ReplayedSequence:
    """Token ids of one choice: those in its journal, and those computed again up to that length."""

    stored: tuple[int, ...]
    computed: tuple[int, ...]

    @property
    def difference(self) -> int | None:
        """Index of the first token that differs or is missing; None when all stored tokens were computed again."""
        for index, token in enumerate(self.stored):
            if index >= len(self.computed) or self.computed[index] != token:
                return index
        return None


def replay(
    id: Annotated[str, Parameter(help="The request's id, from `x-baton-request-id` or the answer's `id`.")],
    /,
    *,
    settings: Annotated[ReplaySettings | None, Parameter(name="*")] = None,
) -> int:
    """Compute a stored request again and compare its tokens; exits with 1 at a difference."""
    refuse_unknown_variables(COMMANDS.values())
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    return asyncio.run(_replay(RequestId(id), settings or ReplaySettings()))


async def _replay(id: RequestId, settings: ReplaySettings) -> int:
    directory = resolve_model(settings.model, ModelFiles.TEXT)
    text = TextModel.load(directory)
    images = read_image_model(directory, text.added_token, text.encode)
    store = await connect(settings.redis_url, trust=read_trust(settings))
    try:
        sequences = await replay_call(id, store, text, settings, images)
    finally:
        await store.close()
    for choice, sequence in enumerate(sequences):
        print(f"choice {choice}: {_describe(sequence, text)}")
    return EXIT_DIFFERENT if any(sequence.difference is not None for sequence in sequences) else 0


async def replay_call(
    id: RequestId, store: StateStore, text: TextModel, settings: ReplaySettings, images: ImageModel | None = None
) -> list[ReplayedSequence]:
    """Computes the sequences of a call again, one after another. `images`: of the model; None for one of text.

    Raises `NotReplayable`, `Interrupted` and `Refused`.
    """
    call = await store.get_call(id)
    if call is None:
        raise NotReplayable(
            f"the state store has no call {id}. The id is wrong, the call was not durable (see `x-baton-durable`), "
            "or it is older than the store's retention."
        )
    journals = [await store.read_journal(sequence_id, 0, 0.0) for sequence_id in call.sequence_ids]
    stored = [tuple(token.token for token in journal.tokens) for journal in journals]
    record = next(filter(None, [await store.get(sequence_id) for sequence_id in call.sequence_ids]), None)
    if record is None or not any(stored):
        raise NotReplayable(f"the state store has no tokens of call {id}: none was computed, or they have expired.")
    images = checked_images(images or ImageModel(), text)
    specs = await _parse(call, record, text, settings, images)
    registry = ChosenWorkers(store, settings.prefill, settings.decode)
    async with open_backend(_router_settings(settings), registry, text.digest) as backend:
        await _wait_until_ready(backend, record.fingerprint, settings.wait_s)
        computed = [await _compute(backend, spec, len(tokens)) for spec, tokens in zip(specs, stored, strict=True)]
    return [ReplayedSequence(*tokens) for tokens in zip(stored, computed, strict=True)]


class ChosenWorkers(MemoryStore):
    """A memory store whose registry shows the chosen workers of another one, or all of a role when none is chosen."""

    def __init__(self, registry: WorkerRegistry, prefill: str | None, decode: str | None) -> None:
        super().__init__()
        self._registry = registry
        self._chosen = {WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode}

    async def workers(self) -> list[WorkerRecord]:
        """See `WorkerRegistry.workers`."""
        records = await self._registry.workers()
        return [record for record in records if self._chosen[record.role] in (None, WorkerId(record.id))]

    def changes(self) -> AsyncIterator[None]:
        """See `WorkerRegistry.changes`."""
        return self._registry.changes()


async def _parse(
    call: CallRecord, record: SequenceRecord, text: TextModel, settings: ReplaySettings, images: ImageModel
) -> list[SequenceSpec]:
    max_model_len = text.max_position_tokens or DEFAULT_CONTEXT_TOKENS
    body = parse_object(call.body)
    messages = body.get("messages")
    shows_images = isinstance(messages, list) and any(has_images(message.get("content")) for message in messages)
    if shows_images and images.rules is None:
        raise NotReplayable(f"call {call.id} has images, and this model is served without. {images.reason}".strip())
    names = [name for name in (body.get("model"),) if isinstance(name, str)]
    validator = RequestValidator(text, record.model, max_model_len, settings.wait_s, names, images)
    parsed = await RequestParser(validator, text, "replay").parse(raw_request_of(call))
    request = await _with_files(parsed.request, settings)
    attempt_salt = uuid.uuid4().hex
    return [
        replace(
            sequence,
            id=RequestId(f"replay-{attempt_salt}-{choice}"),
            salt=f"{sequence.salt}{attempt_salt}" if settings.fresh else sequence.salt,
            fingerprint=record.fingerprint,
        )
        for choice, sequence in enumerate(request.sequences)
    ]


async def _with_files(request: ValidRequest, settings: ReplaySettings) -> ValidRequest:
    """The request with the files of its images, from the state store. Raises `NotReplayable` if some are missing."""
    if not request.files:
        return request
    store = connect_media(settings.redis_url, trust=read_trust(settings))
    media = CallMedia(store)
    try:
        restored = await media.restored(request)
        missing = [file.identity for file in restored.files if file.data is None]
        is_late = bool(missing) and await store.holds(request.tenant, missing)
    except StoreUnavailable as error:
        raise NotReplayable(f"the images of call {request.id} cannot be read now: {error}") from None
    finally:
        await media.close()
    if is_late:
        raise NotReplayable(f"the state store did not give all images of call {request.id} in time: try again.")
    if missing:
        raise NotReplayable(
            f"the state store has not all images of call {request.id}: it was not durable, or they have expired."
        )
    return restored


def _router_settings(settings: ReplaySettings) -> RouterSettings:
    return RouterSettings(
        model=settings.model,
        redis_url=settings.redis_url,
        router_id="replay",
        cluster_secret_file=settings.cluster_secret_file,
        tls_cert_file=settings.tls_cert_file,
        tls_key_file=settings.tls_key_file,
        tls_ca_file=settings.tls_ca_file,
    )


async def _wait_until_ready(backend: RunningBackend, fingerprint: str, wait_s: float) -> None:
    workers = backend.workers
    try:
        async with asyncio.timeout(wait_s):
            while not workers.readiness()[0]:
                await workers.wait_for_change()
    except TimeoutError:
        raise NoWorkers(f"within {wait_s:g} s: {workers.readiness()[1]}") from None
    if not workers.has_model(fingerprint):
        raise NotReplayable(f"no chosen pair of workers has the model of this request (fingerprint {fingerprint}).")


async def _compute(backend: RunningBackend, spec: SequenceSpec, num_tokens: int) -> tuple[int, ...]:
    """The first `num_tokens` tokens of the sequence, fewer if it ends before."""
    if num_tokens == 0:
        return ()
    stop = replace(spec.stop, max_tokens=num_tokens, min_tokens=min(spec.stop.min_tokens, num_tokens))
    timer = RequestTimer(RequestOrigin("replay"), time.monotonic())
    timer.begin(spec.id, 1, len(spec.prompt_tokens), stream=True)
    admitted = backend.dispatcher.admit(replace(spec, stop=stop), timer.sequences[0])
    return tuple([token.token async for chunk in backend.dispatcher.run(admitted) for token in chunk.tokens])


def _describe(sequence: ReplayedSequence, text: TextModel) -> str:
    index = sequence.difference
    if index is None:
        return f"{len(sequence.stored)} tokens, all equal"
    stored = sequence.stored[index]
    computed = sequence.computed[index] if index < len(sequence.computed) else None
    shown = "nothing, the sequence ends" if computed is None else f"{computed} ({text.token_text(computed)!r})"
    return f"first difference at token {index}: stored {stored} ({text.token_text(stored)!r}), computed {shown}"
