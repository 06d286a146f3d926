"""Sends the file of an image to a worker: the caller's side of `PutMedia`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.rpc.gen import prefill_pb2
from baton.rpc.gen.encode_pb2_grpc import EncodeStub
from baton.rpc.gen.prefill_pb2_grpc import PrefillStub
from baton.rpc.request_metadata import Metadata

MAX_PART_BYTES = 1024 * 1024
"""Of a file, in one message."""


async def put_media(
    stub: PrefillStub | EncodeStub,
    header: prefill_pb2.MediaHeader,
    data: bytes,
    timeout_s: float,
    metadata: Metadata = (),
    on_part: Callable[[int], None] = lambda num_bytes: None,
) -> prefill_pb2.PutMediaResponse:
    """Sends `data`, which `header` describes; none with a `source`.

    `on_part` gets the bytes of each part that gRPC takes. Raises `grpc.aio.AioRpcError`.
    """
    response: prefill_pb2.PutMediaResponse = await stub.PutMedia(
        media_parts(header, data, on_part), timeout=timeout_s, metadata=metadata
    )
    return response


def media_parts(
    header: prefill_pb2.MediaHeader, data: bytes, on_part: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[prefill_pb2.PutMediaRequest]:
    """The messages of one call."""
    yield prefill_pb2.PutMediaRequest(header=header)
    for first in range(0, len(data), MAX_PART_BYTES):
        part = data[first : first + MAX_PART_BYTES]
        on_part(len(part))
        yield prefill_pb2.PutMediaRequest(data=part)
