"""A dispatcher whose workers serve images, and sequences that have some."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.domain.media.identity import media_identity
from baton.domain.media.span import MediaSpan
from baton.domain.worker import IMAGE, TEXT
from baton.services.router.dispatch.dispatcher import DispatchLimits
from baton.services.router.generation import MediaFile, SequenceSpec
from tests.mock_workers import ScriptedAction
from tests.service.dispatch.dispatch_world import LIMITS, World, sequence, two_refreshes, world

PROCESSOR = "p" * 32
PLACEHOLDER = 99
RED, BLUE = b"red" * 1000, b"blue" * 750
"""Files of one size: the same tokens stand for both."""


def image(data: bytes, param: str = "messages[0].content[0].image_url.url") -> MediaFile:
    return MediaFile(media_identity(data, PROCESSOR), data, len(data), PROCESSOR, "auto", 4, None, param)


def seen(name: str, *data: bytes, salt: str = "", max_tokens: int = 5) -> SequenceSpec:
    """A sequence whose prompt has an image of 4 rows for each of `data`, with text before and between."""
    prompt: list[int] = []
    media = []
    files = tuple(map(image, data))
    for file in files:
        prompt += [1, 2, 3]
        media.append(MediaSpan(len(prompt), 4, file.identity))
        prompt += [PLACEHOLDER] * 4
    spec = sequence(name, prompt=(*prompt, 5), max_tokens=max_tokens)
    return replace(spec, media=tuple(media), files=files, salt=salt)


@asynccontextmanager
async def vision(
    num_prefill: int = 1, script: tuple[ScriptedAction, ...] = (), limits: DispatchLimits = LIMITS
) -> AsyncIterator[World]:
    """A world whose workers serve images."""
    async with world(prefill=[script] * num_prefill, limits=limits) as w:
        for worker in (*w.cluster.prefills, *w.cluster.decodes):
            worker.modalities = (TEXT, IMAGE)
        for prefill in w.cluster.prefills:
            prefill.processor = PROCESSOR
        await announce(w)
        yield w


async def announce(w: World) -> None:
    """Announces what the test has changed, and waits until the router has read it."""
    await w.cluster.announce()
    await two_refreshes(w)
