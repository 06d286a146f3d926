"""Images without pixels. A row of an embedding is a number that follows from the image's identity and the row alone.

So a client knows what the model must see, and a worker that uses another image's rows, or none, gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

from baton.domain.errors import Broken
from baton.domain.media.identity import media_identity
from baton.domain.media.span import MediaSpan
from baton.engine.batch import Row, SampleSpec
from baton.engine.drafts.hidden_media import FIRST_HIDDEN
from baton.engine.media.step_inputs import EmbeddingSource
from simulation.policies import PLACEHOLDER
from simulation.scenario import ClientPlan, ImagePlan

PROCESSOR = "5" * 32
"""Digest of the image processor, as workers and routers announce it."""


def image_file(image: ImagePlan) -> bytes:
    """The file of an image."""
    return bytes((image.number, image.num_rows)) + b" of a picture"


def read_image(file: bytes) -> tuple[int, int]:
    """Number and rows of the image in a file."""
    return file[0], file[1]


def image_identity(image: ImagePlan) -> bytes:
    """The identity that routers and workers find."""
    return media_identity(image_file(image), PROCESSOR)


def row_value(identity: bytes, row: int) -> int:
    """The only number of a row: positive, of 31 bits, and no token id."""
    digest = blake2b(identity + row.to_bytes(4, "little"), digest_size=4, person=b"baton-sim").digest()
    return PLACEHOLDER + 1 + (int.from_bytes(digest, "little") >> 2)


def shown(tokens: Sequence[int], media: Iterable[MediaSpan], start: int = 0) -> list[int]:
    """`tokens`, which begin at position `start`, with the rows that the model must see in place of placeholders."""
    seen = list(tokens)
    for span in media:
        for position in range(max(start, span.first), min(start + len(seen), span.end)):
            seen[position - start] = row_value(span.identity, span.first_row + position - span.first)
    return seen


def with_rows(hidden: Sequence[int], media: Sequence[MediaSpan]) -> list[int]:
    """What `hide_media` has made of a row, with all rows of its images in place of the negative tokens."""
    seen: list[int] = []
    for token in hidden:
        if token >= 0:
            seen.append(token)
            continue
        span = media[FIRST_HIDDEN - token]
        seen += [row_value(span.identity, span.first_row + row) for row in range(span.num_tokens)]
    return seen


def placed(plan: ClientPlan) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """The prompt of a client with the placeholders of its images, and their spans."""
    tokens, spans, at = list[int](), list[MediaSpan](), 0
    for image in plan.images:
        tokens += plan.prompt[at : image.at]
        spans.append(MediaSpan(len(tokens), image.num_rows, image_identity(image)))
        tokens += [PLACEHOLDER] * image.num_rows
        at = image.at
    return [*tokens, *plan.prompt[at:]], tuple(spans)


def seen_prompt(plan: ClientPlan) -> list[int]:
    """The prompt of a client as the model must see it."""
    tokens, spans = placed(plan)
    return shown(tokens, spans)


def see_images(row: Row, source: EmbeddingSource | None) -> Row:
    """The row with what the embeddings of `source` show in place of placeholders, also in the history of its samples.

    Raises `Broken` for a row without an embedding: the scheduler put it into the step too soon.
    """
    tokens = list(row.tokens)
    for span in row.media:
        for position in range(max(row.start, span.first), min(row.start + len(tokens), span.end)):
            embedding = None if source is None else source.get(span.identity)
            if embedding is None:
                raise Broken(f"{row.id}: no embedding of media {span.identity.hex()} for position {position}")
            tokens[position - row.start] = int(embedding.rows[span.first_row + position - span.first, 0])

    def see_history(spec: SampleSpec) -> SampleSpec:
        return replace(spec, history=shown(spec.history, row.media))

    sample = None if row.sample is None else see_history(row.sample)
    return replace(row, tokens=tokens, sample=sample, drafted=tuple(map(see_history, row.drafted)))
