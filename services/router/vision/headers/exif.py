"""Finds the orientation in EXIF data (TIFF 6.0, tag 0x0112). Called by the readers of formats; reads nothing else."""

from __future__ import annotations

import struct

PREFIX = b"Exif\0\0"
_ORIENTATION, _SHORT = 0x0112, 3
_MAX_ENTRIES = 512


def read_orientation(exif: bytes) -> int:
    """The orientation, 1 to 8; 1 where there is none or the data are damaged, as decoders do."""
    tiff = exif[len(PREFIX) :] if exif.startswith(PREFIX) else exif
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (offset,) = struct.unpack_from(order + "I", tiff, 4)
    if offset + 2 > len(tiff):
        return 1
    (num_entries,) = struct.unpack_from(order + "H", tiff, offset)
    for entry in range(min(num_entries, _MAX_ENTRIES)):
        at = offset + 2 + 12 * entry
        if at + 12 > len(tiff):
            break
        tag, kind, count, value = struct.unpack_from(order + "HHIH", tiff, at)
        if tag == _ORIENTATION:
            return value if kind == _SHORT and count == 1 and 1 <= value <= 8 else 1
    return 1
