"""Opens the file tier of a worker: locks a folder, reads its index, starts the threads. Called once, by `app`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from baton.engine.build import Engine
from baton.engine.file_tier.controller import FileTierController
from baton.kv.file_tier.tier import FileTier
from baton.settings.base import SettingsError
from baton.settings.groups import MIB, FileTierWrite
from baton.telemetry.logs import get_logger
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.mover import FileMover
from baton.transfer.file_tier.slot_file import FolderClaim, SlotFile

log = get_logger()

CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class TierFiles:
    """Where a file tier is and how large it may get."""

    directory: Path
    max_bytes: int
    write: FileTierWrite


def open_file_tier(
    files: TierFiles, engine: Engine, compute_s: Callable[[int, int], float], on_ended: Callable[[], None]
) -> tuple[FileTierController, Callable[[], None]]:
    """The tier with the copies of an earlier process, and what closes it. Raises `SettingsError`."""
    page_bytes, part_ends = engine.memory.page_bytes, engine.memory.part_ends
    num_slots = files.max_bytes // page_bytes
    if num_slots < 1:
        why = f"one page takes {page_bytes / MIB:.1f} MiB"
        raise SettingsError(f"file_tier_bytes={files.max_bytes}", why=why, hint="Raise --file-tier-bytes.")
    stack = ExitStack()
    try:
        folder = FolderClaim(files.directory, engine.fingerprint.digest)
        stack.callback(folder.close)
        slots = SlotFile(folder.path, page_bytes, num_slots)
        index = IndexLog(folder.path, page_bytes, len(part_ends))
    except OSError as error:
        stack.close()
        hint = "Give a directory that this user may write, or start without --file-tier-dir."
        raise SettingsError(f"file_tier_dir={files.directory}", why=str(error), hint=hint) from error
    tier = FileTier(num_slots)
    tier.restore(index.entries)
    mover = FileMover(slots, index, part_ends, on_ended)
    stack.callback(mover.close, CLOSE_S)
    log.info("file_tier_ready", folder=str(folder.path), slots=num_slots, pages=len(tier), write=files.write.value)
    return FileTierController(tier, mover, engine.cache, engine.memory, files.write, compute_s), stack.close
