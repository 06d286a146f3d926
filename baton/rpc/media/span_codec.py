"""Translates media spans of requests to protobuf messages and back. Called by `codec`."""

from __future__ import annotations

from collections.abc import Iterable

from baton.domain.errors import InvalidRequest
from baton.domain.media.span import MAX_SPANS, MediaGrid, MediaSpan
from baton.rpc.gen import common_pb2 as pb


def encode_media(media: Iterable[MediaSpan]) -> list[pb.MediaSpan]:
    """To the wire."""
    return [
        pb.MediaSpan(
            first=span.first,
            num_tokens=span.num_tokens,
            identity=span.identity,
            first_row=span.first_row,
            grid_height=0 if span.grid is None else span.grid.height,
            grid_width=0 if span.grid is None else span.grid.width,
        )
        for span in media
    ]


def decode_media(messages: Iterable[pb.MediaSpan]) -> tuple[MediaSpan, ...]:
    """From the wire. Raises `InvalidRequest` for a span that means nothing, or too many of them."""
    spans = tuple(messages)
    if len(spans) > MAX_SPANS:
        raise InvalidRequest(f"media has {len(spans)} spans, more than {MAX_SPANS}", param="media")
    try:
        return tuple(map(_decode_span, spans))
    except ValueError as error:
        raise InvalidRequest(f"media: {error}", param="media") from None


def _decode_span(message: pb.MediaSpan) -> MediaSpan:
    has_grid = message.grid_height or message.grid_width
    grid = MediaGrid(message.grid_height, message.grid_width) if has_grid else None
    return MediaSpan(message.first, message.num_tokens, message.identity, grid, message.first_row)
