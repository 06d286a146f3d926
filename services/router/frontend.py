"""Assembles everything between HTTP and the dispatcher. Called by `app` and by tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import baton
from baton.domain.ids import OwnerId, RequestId
from baton.domain.worker import IMAGE, TEXT
from baton.services.router.generation import Dispatcher
from baton.services.router.openai.constraint.checker import ConstraintChecker
from baton.services.router.openai.images.parts import checked_images
from baton.services.router.openai.request_parser import RequestParser
from baton.services.router.openai.tokenization import TokenizationParser
from baton.services.router.openai.validation import RequestValidator
from baton.services.router.respond import ResponseContext
from baton.services.router.resume import Resumer
from baton.services.router.streaming.unread_buffer import UnreadBudget
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.call_ownership import CallOwnership
from baton.services.router.takeover.loss_watcher import LossWatcher
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.services.router.takeover.takeover import TakeoverContext, Takeovers
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel
from baton.services.router.vision.remote.allowed_hosts import AllowedHosts
from baton.services.router.vision.remote.fetcher import ImageFetcher, Network
from baton.store.media.memory_media_file_store import MemoryMediaFileStore
from baton.store.options import StoreOptions
from baton.store.ownership import patience_s
from baton.store.store import Durability, StateStore
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.request_traces import RequestTraces

IMAGE_BODY_BYTES = 48 * 1024 * 1024
"""Largest body of a chat with a model with images: 32 MiB of files as base64, and text."""

FINGERPRINT = f"baton-{baton.__version__}"


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Settings of the HTTP side. `max_model_len`: prompt and answer together, in tokens.

    `other_model_names`: further names of the model. `always_ids`: every streamed event has an id, not only those for
    SSE clients. `store_prompts` False: every call is private. `strict_fields`: unknown fields are refused.
    `cors_origins`: origins whose pages may call; "*" for any. `media_domains`: hosts that images are fetched from,
    over `media_network`; None: the real one.
    """

    model_name: str
    max_model_len: int
    other_model_names: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    request_deadline_s: float = 600.0
    ping_interval_s: float = 15.0
    always_ids: bool = False
    store_prompts: bool = True
    strict_fields: bool = False
    cors_origins: tuple[str, ...] = ()
    media_domains: tuple[str, ...] = ()
    media_network: Network | None = None


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Access to the state store: reading, writing, and the identity of this router.

    `durability`: of what the store acknowledges now. `media`: files of images.
    """

    store: StateStore
    writer: StoreWriter
    owner: OwnerId
    supersede_listener: SupersedeListener
    durability: Callable[[], Durability] = lambda: Durability.NONE
    owner_ttl_s: float = StoreOptions().owner_ttl_s
    losses: LossWatcher = field(default_factory=lambda: LossWatcher(patience_s(StoreOptions().owner_ttl_s)))
    media: CallMedia = field(default_factory=lambda: CallMedia(MemoryMediaFileStore()))


@dataclass(frozen=True, slots=True)
class Frontend:
    """Everything between HTTP and the dispatcher. The caller drains and closes `takeovers`.

    `encodes`: True while workers encode images of this processor. `held_tokens`: most tokens of a request that the
    workers can hold now; None without workers.
    `rate_headers`: response headers with the rates of a tenant.
    """

    text: TextModel
    limits: ApiLimits
    traces: RequestTraces

    parser: RequestParser
    response_context: ResponseContext
    resumer: Resumer
    takeovers: Takeovers
    tokenization: TokenizationParser
    constraints: ConstraintChecker
    images: ImageModel
    encodes: Callable[[str], bool] = lambda processor: False
    held_tokens: Callable[[], int | None] = lambda: None
    rate_headers: Callable[[str], Mapping[str, str]] = lambda tenant: {}

    def modalities(self) -> list[str]:
        """What messages may have, as the model and the workers allow. Without a chat template there are none."""
        has_chats = self.text.has_chat_template
        serves_images = has_chats and self.images.rules is not None and self.encodes(self.images.processor)
        return [TEXT, IMAGE] if serves_images else [TEXT]

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a chat: more for a model with images, which come in it as base64."""
        has_images = self.images.rules is not None
        return max(self.limits.max_body_bytes, IMAGE_BODY_BYTES if has_images else 0)

    def max_model_len(self) -> int:
        """Most tokens of a request, as the model and the workers allow."""
        held = self.held_tokens()
        return self.limits.max_model_len if held is None else min(held, self.limits.max_model_len)


def build_frontend(
    text: TextModel,
    dispatcher: Dispatcher,
    limits: ApiLimits,
    traces: RequestTraces,
    store_access: StoreAccess,
    images: ImageModel | None = None,
) -> Frontend:
    """Must be called on the event loop that uses it. `images`: None for a model of text."""
    images = checked_images(images or ImageModel(), text)
    validator = RequestValidator(
        text, limits.model_name, limits.max_model_len, limits.request_deadline_s, limits.other_model_names, images
    )
    parser = RequestParser(validator, text, FINGERPRINT, _image_fetcher(limits, images))
    call_ownership = CallOwnership(
        store_access.writer, store_access.owner, store_access.durability, text.digest, store_access.media
    )
    takeovers = _build_takeovers(text, parser, dispatcher, call_ownership, store_access)
    unread = UnreadBudget()

    async def may_return(id: RequestId) -> bool:
        return call_ownership.holds(id) or await store_access.losses.excuses_missing()

    resumer = Resumer(
        store_access.store,
        parser,
        text,
        takeovers,
        traces,
        limits.ping_interval_s,
        store_access.durability,
        unread,
        may_return,
        dispatcher,
        store_access.owner,
        store_access.media,
    )
    response_context = ResponseContext(
        dispatcher,
        text,
        call_ownership,
        store_access.supersede_listener,
        resumer.follow,
        limits.ping_interval_s,
        limits.always_ids,
        unread,
        resumer.scoring,
    )
    return Frontend(
        text,
        limits,
        traces,
        parser,
        response_context,
        resumer,
        takeovers,
        TokenizationParser(validator, text),
        ConstraintChecker(text),
        images,
    )


def _image_fetcher(limits: ApiLimits, images: ImageModel) -> ImageFetcher | None:
    """None for a model of text, and where no host is listed."""
    if not limits.media_domains or images.rules is None:
        return None
    return ImageFetcher(AllowedHosts(limits.media_domains), images.limits, limits.media_network)


def _build_takeovers(
    text: TextModel,
    parser: RequestParser,
    dispatcher: Dispatcher,
    call_ownership: CallOwnership,
    store_access: StoreAccess,
) -> Takeovers:
    return Takeovers(
        TakeoverContext(
            store_access.store,
            parser,
            dispatcher,
            text,
            call_ownership,
            store_access.supersede_listener,
            patience_s(store_access.owner_ttl_s),
            store_access.media,
        )
    )
