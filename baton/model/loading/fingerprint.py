"""Fingerprints the weights in a directory: workers with different ones must never be linked.

Called once at load. Hashes config.json and, of every weight file, its size and both ends. A safetensors file begins
with the names, types and offsets of its tensors; hashing gigabytes would double the loading time.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from baton.model.loading.quantization import Quantization

END_BYTES = 256 * 1024
_WEIGHTS = ("*.safetensors", "*.bin")


def weights_fingerprint(directory: Path, quantization: Quantization) -> str:
    """The fingerprint that workers compare. Quantised weights write other keys and values, so it names the format."""
    digest = weights_digest(directory)
    return digest if quantization is Quantization.NONE else f"{digest}+{quantization.value}"


def weights_digest(directory: Path) -> str:
    """A digest of the weights in `directory`: equal for copies, different for another checkpoint."""
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
