"""Which weights a directory holds, as a short name: two workers that hold different ones must never be linked.

Called once at load. Reads config.json whole, and of every weight file its size and both ends: a safetensors file begins
with the names, types and places of its tensors, and hashing gigabytes would double the time that loading takes.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from baton.model.loading.quantization import Quantization

END_BYTES = 256 * 1024
_WEIGHTS = ("*.safetensors", "*.bin")


def weights_fingerprint(directory: Path, quantization: Quantization) -> str:
    """What workers compare: the same weights in another number format write other keys and values."""
    digest = weights_digest(directory)
    return digest if quantization is Quantization.NONE else f"{digest}+{quantization.value}"


def weights_digest(directory: Path) -> str:
    """A name for the weights in `directory`; equal for copies, different for another checkpoint."""
    digest = blake2b(digest_size=8)
    digest.update((directory / "config.json").read_bytes())
    for path in sorted(path for pattern in _WEIGHTS for path in directory.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(END_BYTES))
            file.seek(max(0, size - END_BYTES), os.SEEK_SET)
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()
