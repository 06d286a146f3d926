"""Sends the file of an image to a prefill worker: the caller's side of `Prefill.PutMedia`."""

from __future__ import annotations

from collections.abc import Iterator

from baton.rpc.gen import prefill_pb2
from baton.rpc.gen.prefill_pb2_grpc import PrefillStub
from baton.rpc.request_metadata import Metadata

MAX_PART_BYTES = 1024 * 1024
"""Of a file, in one message."""


async def put_media(
    stub: PrefillStub, header: prefill_pb2.MediaHeader, data: bytes, timeout_s: float, metadata: Metadata = ()
) -> prefill_pb2.PutMediaResponse:
    """Sends `data`, which `header` describes. Raises `grpc.aio.AioRpcError`."""
    response: prefill_pb2.PutMediaResponse = await stub.PutMedia(
        media_parts(header, data), timeout=timeout_s, metadata=metadata
    )
    return response


def media_parts(header: prefill_pb2.MediaHeader, data: bytes) -> Iterator[prefill_pb2.PutMediaRequest]:
    """The messages of one call."""
    yield prefill_pb2.PutMediaRequest(header=header)
    for first in range(0, len(data), MAX_PART_BYTES):
        yield prefill_pb2.PutMediaRequest(data=data[first : first + MAX_PART_BYTES])
