"""Opens the tiers of a worker. A file tier locks a folder, reads its index, starts threads. Called once, by `app`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from baton.domain.errors import LinkBroken
from baton.engine.build import Engine
from baton.engine.tiers.controller import TierController
from baton.kv.memory import PageMemory
from baton.kv.page_digests import is_windowless
from baton.kv.tiers.tier import CacheTier
from baton.settings.base import SettingsError
from baton.settings.groups import MIB
from baton.settings.tiers import FileTierMover, TierWrite
from baton.telemetry.logs import get_logger
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.mover import FileMover
from baton.transfer.file_tier.nixl_slot_file import NixlSlotFile
from baton.transfer.file_tier.slot_file import FolderClaim, SlotFile
from baton.transfer.host_tier.mover import HostMover

log = get_logger()

CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class TierFiles:
    """Where a file tier is, how large it may get, and what moves its bytes."""

    directory: Path
    max_bytes: int
    write: TierWrite
    mover: FileTierMover = FileTierMover.PREADV


def open_host_tier(
    num_mib: int, write: TierWrite, engine: Engine, compute_s: Callable[[int, int], float]
) -> TierController:
    """An empty tier in `num_mib` MiB of host memory. Raises `SettingsError` if a page does not fit."""
    page_bytes = engine.memory.page_bytes
    num_slots = num_mib * MIB // page_bytes
    if num_slots < 1:
        why = f"one page takes {page_bytes / MIB:.1f} MiB"
        raise SettingsError(f"host_tier_mib={num_mib}", why=why, hint="Raise --host-tier-mib.")
    memory = PageMemory(num_slots, page_bytes, engine.memory.part_ends)
    log.info("host_tier_ready", slots=num_slots, write=write.value)
    tier = CacheTier(num_slots, num_parts=engine.cache.pool.num_window_parts)
    return TierController(tier, HostMover(memory), engine.cache, engine.memory, write, compute_s)


def open_file_tier(
    files: TierFiles, engine: Engine, compute_s: Callable[[int, int], float], on_ended: Callable[[], None]
) -> tuple[TierController, Callable[[], None]]:
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
        is_nixl = files.mover is FileTierMover.NIXL
        slots = (NixlSlotFile if is_nixl else SlotFile)(folder.path, page_bytes, num_slots)
        index = IndexLog(folder.path, page_bytes, len(part_ends))
    except OSError as error:
        stack.close()
        hint = "Give a directory that this user may write, or start without --file-tier-dir."
        raise SettingsError(f"file_tier_dir={files.directory}", why=str(error), hint=hint) from error
    except (ImportError, LinkBroken) as error:
        stack.close()
        hint = "Install baton-serve[nixl], or start with --file-tier-mover preadv."
        raise SettingsError(f"file_tier_mover={files.mover.value}", why=str(error), hint=hint) from error
    tier = CacheTier(num_slots, num_parts=engine.cache.pool.num_window_parts)
    # A worker with window slots may have left copies without their window parts, which nothing can use without slots.
    has_slots = engine.cache.pool.windows is not None
    tier.restore(one for one in index.entries if has_slots or not is_windowless(one.digest, len(part_ends)))
    mover = FileMover(slots, index, part_ends, on_ended)
    stack.callback(mover.close, CLOSE_S)
    found = {"slots": num_slots, "pages": len(tier), "write": files.write.value, "mover": slots.mover}
    log.info("file_tier_ready", folder=str(folder.path), **found)
    return TierController(tier, mover, engine.cache, engine.memory, files.write, compute_s), stack.close
