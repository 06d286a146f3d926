"""Names everything that ready weights and the verdict on them depend on.

A worker may map a file only if every part is equal: then the file is what it would have computed itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash

from baton import __version__
from baton.domain.fingerprint import digest_of
from baton.model.cpu import has_bfloat16_arithmetic
from baton.model.kernels.build import build_specs, source_digest
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from baton.model.loading.loader import DecoderChoice
from baton.model.loading.quantization import Quantization
from baton.model.weight_file.format import FORMAT_VERSION

PACKAGE = Path(__file__).resolve().parents[1]
CPU_INFO = Path("/proc/cpuinfo")
_CPU_LINES = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The arguments of `load_model` that change weights, pages, or what was checked."""

    dtype: DtypeChoice = DtypeChoice.AUTO
    page_size: int = 16
    head_groups: int = 1
    latent_pages: bool = True
    device: str = "cpu"
    layout: WeightLayout = WeightLayout.AUTO
    decoder: DecoderChoice = DecoderChoice.AUTO
    kernels: KernelUse = KernelUse.AUTO
    quantization: Quantization = Quantization.NONE

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of `load_model`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def named(self) -> dict[str, str]:
        """Every option as text."""
        return {name: str(getattr(value, "value", value)) for name, value in self.arguments().items()}


def key_parts(directory: Path, root: str, options: LoadOptions) -> dict[str, str]:
    """The parts of a key by name. `root`: the digest of every byte of the checkpoint (`checkpoint_root`)."""
    chosen = choose_kernels(options.kernels, options.device)
    level = None if chosen.kernels is None else chosen.kernels.level
    sources = [source_digest(spec) for spec in build_specs() if spec.level is level]
    return {
        **options.named(),
        "format": str(FORMAT_VERSION),
        "weights": root,
        "config": xxhash.xxh3_128_hexdigest((directory / "config.json").read_bytes()),
        "level": "none" if level is None else level.value,
        "kernel_sources": "".join(sources),
        "loader_sources": loader_sources(),
        "cpu": cpu_identity(),
        "torch_level": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": str(has_bfloat16_arithmetic()),
        "baton": __version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


@functools.cache
def loader_sources(package: Path = PACKAGE) -> str:
    """Digest of the code that loads and packs, which changes between releases, and in a checkout without one."""
    digest = xxhash.xxh3_128()
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def key_of(parts: dict[str, str]) -> str:
    """BLAKE2b-128 of the parts, as 32 hexadecimal digits."""
    return digest_of(text for part in sorted(parts.items()) for text in part)


def cpu_identity() -> str:
    """Digest of the first CPU's kind and features; of nothing where the system does not tell."""
    try:
        first = CPU_INFO.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        first = ""
    lines = [line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_LINES]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
