"""Requests with images. The real parser reads all but their images, which come in a field of their own as numbers.

Chats, `data:` URLs and the count of tokens are not simulated. A stored call refers to its images, as a real one does.
"""

from __future__ import annotations

import json
from dataclasses import replace

from baton.services.router.generation import MediaFile
from baton.services.router.openai.request_parser import ParsedRequest, RawRequest, RequestParser
from baton.services.router.vision.remote.fetcher import Fetched
from simulation.scenario import ClientPlan, ImagePlan
from simulation.vision.images import PROCESSOR, image_file, image_identity, placed

FIELD = "sim_images"


def images_field(plan: ClientPlan) -> list[tuple[int, int, int]]:
    """What the body of a request has in `FIELD`."""
    return [(image.at, image.number, image.num_rows) for image in plan.images]


class ImageRequestParser(RequestParser):
    """In place of `RequestParser` in `baton.services.router.frontend`."""

    def _parse(self, raw: RawRequest, fetched: Fetched | None = None) -> ParsedRequest:
        parsed = super()._parse(raw, fetched)
        images = [ImagePlan(*image) for image in json.loads(raw.body).get(FIELD, ())]
        if not images:
            return parsed
        request = parsed.request
        (prompt,) = request.prompts
        tokens, spans = placed(ClientPlan(request.id, 0.0, prompt, 1, 0, images=tuple(images)))
        files = tuple(_file(image, stored=raw.stored) for image in images)
        sequences = tuple(
            replace(sequence, prompt_tokens=tuple(tokens), media=spans, files=files) for sequence in request.sequences
        )
        return replace(parsed, request=replace(request, prompts=(tuple(tokens),), sequences=sequences))


def _file(image: ImagePlan, *, stored: bool) -> MediaFile:
    file = image_file(image)
    data = None if stored else file
    return MediaFile(image_identity(image), data, len(file), PROCESSOR, "", image.num_rows, None, FIELD)
