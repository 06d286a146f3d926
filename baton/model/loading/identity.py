"""Identity of a checkpoint: covers every byte of every tensor in a model's directory. Called once at load.

xxh3-128 of each tensor's raw bytes, read through a mapping of the file that the loader reads as well. A fine-tune of
one expert changes the identity; another order or other files for the same tensors do not.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import xxhash

from baton.domain.fingerprint import Fingerprint, FingerprintPart, digest_of
from baton.kv.geometry import KVGeometry
from baton.model.errors import UnreadableModel
from baton.model.loading.quantization import Quantization

SAMPLER_VERSION = 2
"""Raise it when the same logits, seed and position may draw another token."""

MAX_HEADER_BYTES = 100_000_000
_SIZE_BYTES = 8


def model_fingerprint(
    directory: Path, root: str, tokenizer: str, geometry: KVGeometry, quantization: Quantization, draft: str = ""
) -> Fingerprint:
    """The fingerprint of a worker. `root`: `checkpoint_root`; `tokenizer`: the digest of its text files.

    `draft`: `draft_identity`; without a draft model there is no such part.
    """
    parts = {
        **geometry.parts(),
        "weights": root,
        "config": _config_digest(directory),
        "tokenizer": tokenizer,
        "quantization": quantization.value,
        "adapters": "none",
        "sampler_version": str(SAMPLER_VERSION),
    }
    if draft:
        parts["draft_model"] = draft
    return Fingerprint(tuple(FingerprintPart(name, digest) for name, digest in parts.items()))


def draft_identity(directory: Path, root: str) -> str:
    """What names the draft model in `directory`: its weights and config. `root`: its `checkpoint_root`."""
    return digest_of((root, _config_digest(directory)))


def _config_digest(directory: Path) -> str:
    return xxhash.xxh3_128_hexdigest((directory / "config.json").read_bytes())


def checkpoint_root(directory: Path) -> str:
    """BLAKE2b-128 over the sorted (name, dtype, shape, digest) of all tensors. Blocks while it reads them.

    Raises `UnreadableModel` for a file that is missing or is no checkpoint.
    """
    paths = sorted(directory.glob("*.safetensors"))
    entries = [entry for path in paths for entry in _read_tensors(path)]
    for path in sorted(directory.glob("*.bin")):
        entries.append(("file", path.name, "", _digest_file(path)))
    if not entries:
        raise UnreadableModel(f"no weights in {directory}: there is no *.safetensors")
    return digest_of(field for entry in sorted(entries) for field in entry)


def _read_tensors(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Name, dtype, shape and digest of each tensor of a safetensors file."""
    with _mapped(path) as data:
        num_header_bytes = int.from_bytes(data[:_SIZE_BYTES], "little")
        start = _SIZE_BYTES + num_header_bytes
        try:
            if not 2 <= num_header_bytes <= min(MAX_HEADER_BYTES, len(data) - _SIZE_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(bytes(data[_SIZE_BYTES:start]))
            for name, tensor in header.items():
                if name != "__metadata__":
                    first, last = tensor["data_offsets"]
                    if not 0 <= first <= last <= len(data) - start:
                        raise ValueError(f"tensor {name} ends after the file")
                    digest = xxhash.xxh3_128_hexdigest(data[start + first : start + last])
                    yield name, str(tensor["dtype"]), json.dumps(tensor["shape"]), digest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableModel(f"{path} is no safetensors file: {error}; download the model again") from error


def _digest_file(path: Path) -> str:
    with _mapped(path) as data:
        return xxhash.xxh3_128_hexdigest(data)


def _mapped(path: Path) -> memoryview:
    """The file's bytes, mapped read-only until the view and its slices are released."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise UnreadableModel(f"{path} cannot be read: {error}; download the model again") from error
    mapping.madvise(mmap.MADV_SEQUENTIAL)
    return memoryview(mapping)
