"""Form of a weight file: tensors, an index, a footer that proves the file whole.

    0            tensors, each at a multiple of 4096, as one run of bytes that huge pages cover
    data_bytes   index (JSON): places of the tensors, digests of the stripes, the caller's manifest
    the end      footer (JSON, 4096 bytes): magic, version, sizes, digest of the index

A stripe is 64 MiB of data with an xxh3-128 digest. A file that is cut, torn or changed in one bit is refused before a
tensor of it is used. The digests are no MAC: `baton.model.weight_file.cache` decides whose files are read at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from baton.domain.arithmetic import ceil_div
from baton.model.weight_file.mapping import map_file

FORMAT_VERSION = 1
MAGIC = "baton-weights"
ALIGNMENT = 4096
FOOTER_BYTES = 4096
STRIPE_BYTES = 64 * 1024 * 1024
"""Also the length of a write: long writes at aligned places make the file system keep the file in large folios."""
MAX_INDEX_BYTES = 256 * 1024 * 1024


class DamagedFile(Exception):
    """A file is no whole weight file of this version. The message says why, to end a sentence."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor in a file. `dtype`: its name in torch."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A verified file: the caller's manifest, and tensors in a shared read-only mapping of the file."""

    manifest: str
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Index:
    places: tuple[TensorPlace, ...]
    stripes: tuple[str, ...]
    manifest: str


@dataclass(frozen=True, slots=True)
class _Footer:
    magic: str
    version: int
    data_bytes: int
    index_bytes: int
    index: str


def write_weight_file(file: int, tensors: Sequence[torch.Tensor], manifest: str) -> None:
    """Writes contiguous host tensors into the open, empty `file` and makes it durable. Raises `OSError`.

    The space is taken first, so a full disk is noticed before anything is written.
    """
    places, end = _lay_out(tensors)
    data_bytes = ceil_div(end, ALIGNMENT) * ALIGNMENT
    os.posix_fallocate(file, 0, data_bytes + FOOTER_BYTES)
    stripes = []
    for start, stripe in _stripes(tensors, places, data_bytes):
        stripes.append(xxhash.xxh3_128_hexdigest(stripe))
        _write_at(file, stripe, start)
    index = msgspec.json.encode(_Index(tuple(places), tuple(stripes), manifest))
    footer = _Footer(MAGIC, FORMAT_VERSION, data_bytes, len(index), xxhash.xxh3_128_hexdigest(index))
    _write_at(file, memoryview(index + msgspec.json.encode(footer).ljust(FOOTER_BYTES)), data_bytes)
    os.fsync(file)


def read_manifest(file: int) -> str:
    """The manifest of the open `file`; its tensors are not read. Raises `DamagedFile` or `OSError`."""
    return _read_index(file)[1].manifest


def open_weight_file(file: int, num_threads: int = 1) -> WeightFile:
    """Maps the open `file` and verifies every byte of it. Raises `DamagedFile` or `OSError`."""
    footer, index = _read_index(file)
    data = map_file(file, footer.data_bytes)
    view: memoryview = data.numpy().data
    starts = range(0, footer.data_bytes, STRIPE_BYTES)
    with ThreadPoolExecutor(num_threads, "baton-weights") as pool:  # the hash releases the interpreter lock
        found = list(pool.map(lambda start: xxhash.xxh3_128_hexdigest(view[start : start + STRIPE_BYTES]), starts))
    for number, (digest, wanted) in enumerate(zip(found, index.stripes, strict=True)):
        if digest != wanted:
            raise DamagedFile(f"stripe {number} of {len(found)} has another digest")
    return WeightFile(index.manifest, tuple(_tensor(data, place) for place in index.places))


def _lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorPlace], int]:
    """Places of the tensors, in order, and the end of the last one."""
    places, end = [], 0
    for tensor in tensors:
        offset = ceil_div(end, ALIGNMENT) * ALIGNMENT
        places.append(TensorPlace(offset, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        end = offset + tensor.nbytes
    return places, max(end, ALIGNMENT)


def _stripes(
    tensors: Sequence[torch.Tensor], places: Sequence[TensorPlace], data_bytes: int
) -> Iterator[tuple[int, memoryview]]:
    """Offset and bytes of each stripe, gaps between tensors as zeros. A stripe is valid until the next one."""
    buffer = torch.zeros(min(STRIPE_BYTES, data_bytes), dtype=torch.uint8)
    number = 0
    for start in range(0, data_bytes, STRIPE_BYTES):
        end = min(start + STRIPE_BYTES, data_bytes)
        buffer.zero_()
        while number < len(places) and places[number].offset < end:
            content, offset = _bytes_of(tensors[number]), places[number].offset
            low, high = max(start, offset), min(end, offset + content.numel())
            if low < high:
                buffer[low - start : high - start] = content[low - offset : high - offset]
            if offset + content.numel() > end:
                break  # it continues in the next stripe
            number += 1
        yield start, buffer.numpy().data[: end - start]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _write_at(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _read_index(file: int) -> tuple[_Footer, _Index]:
    size = os.fstat(file).st_size
    try:
        footer = msgspec.json.decode(os.pread(file, FOOTER_BYTES, max(0, size - FOOTER_BYTES)), type=_Footer)
        if footer.magic != MAGIC or footer.version != FORMAT_VERSION:
            raise DamagedFile(f"it has version {footer.version}, not {FORMAT_VERSION}")
        if not 0 < footer.index_bytes <= MAX_INDEX_BYTES or footer.data_bytes % ALIGNMENT or footer.data_bytes <= 0:
            raise DamagedFile("its footer has impossible sizes")
        if footer.data_bytes + footer.index_bytes + FOOTER_BYTES != size:
            raise DamagedFile(f"it has {size} bytes, and its footer belongs to another size")
        content = os.pread(file, footer.index_bytes, footer.data_bytes)
        if xxhash.xxh3_128_hexdigest(content) != footer.index:
            raise DamagedFile("its index has another digest")
        index = msgspec.json.decode(content, type=_Index)
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its end is not readable: {error}") from error
    if len(index.stripes) != ceil_div(footer.data_bytes, STRIPE_BYTES):
        raise DamagedFile("its index names another number of stripes")
    return footer, index


def _tensor(data: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    dtype = getattr(torch, place.dtype)
    num_bytes = math.prod(place.shape) * dtype.itemsize
    return data[place.offset : place.offset + num_bytes].view(dtype).view(place.shape)
