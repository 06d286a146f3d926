"""Settings of the tiers below a pool of cached pages."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from baton.settings.base import Settings
from baton.settings.groups import MIB, Count


class TierWrite(StrEnum):
    """Pages that a tier gets copies of: none, those that a second request uses, all, or those that are evicted."""

    NONE = "none"
    SELECTIVE = "selective"
    THROUGH = "through"
    BACK = "back"


class FileTierMover(StrEnum):
    """What moves the bytes of a file tier: system calls, or the POSIX plugin of NIXL."""

    PREADV = "preadv"
    NIXL = "nixl"


class TierSettings(Settings):
    """Tiers that keep copies of cached pages. What is read back is compared with the pages' digests."""

    host_tier_mib: Annotated[int, Field(ge=0)] = 0
    """Host memory for copies of cached pages, in MiB; needs digests. For pools in a GPU's memory; a pool in host memory
    is better made larger. 0: no host tier."""

    host_tier_write: TierWrite = TierWrite.BACK
    """Pages that are copied into the host tier: those that are evicted (back), those that a second request uses
    (selective), all (through) or none."""

    file_tier_dir: Path | None = None
    """Directory for copies of cached pages, which outlive the worker; needs digests. Default: no file tier. The files
    tell what prompts said: they have mode 0700 and are not encrypted."""

    file_tier_bytes: Count = 1024 * MIB
    """Most bytes of pages in the file tier, of each worker."""

    file_tier_write: TierWrite = TierWrite.SELECTIVE
    """Pages that are copied into the file tier: none, those that a second request uses (selective), all (through), or
    those that are evicted (back), which a restart loses."""

    file_tier_mover: FileTierMover = FileTierMover.PREADV
    """What reads and writes the file tier's files: system calls (preadv) or NIXL's POSIX plugin, io_uring where it is
    allowed, else Linux AIO (nixl)."""
