"""Bytes a second and CPU time of what moves a file tier's bytes: system calls, and NIXL's POSIX plugin.

    python -m bench.engine.tiers.file_movers DIRECTORY [--page-kib 192] [--mib 256] [--rounds 7]

Writes and reads the same slots through the product's mover, digests and index included, in rounds that take turns.
Reads are of 16 MiB, as a turn of the engine's. A cached read finds the files in the page cache; before one from disk,
the files are synced and dropped from it. Prints medians, and the CPU time of the process with
the kernel's threads of its io_uring.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.domain.errors import LinkBroken
from baton.domain.ids import PageKey
from baton.engine.tiers.controller import READ_BYTES
from baton.kv.keys import KEY_BYTES
from baton.kv.tiers.tier import SlotEntry
from baton.transfer.digest import page_digest
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.mover import EndedRead, EndedWrite, FileMover
from baton.transfer.file_tier.nixl_slot_file import NixlSlotFile
from baton.transfer.file_tier.posix_agent import ENGINES
from baton.transfer.file_tier.slot_file import SlotFile

MakeFile = Callable[[Path, int, int], SlotFile]
KINDS: Mapping[str, MakeFile] = {
    "preadv": SlotFile,
    **{name: partial(NixlSlotFile, engines=[(name, options)]) for name, options in ENGINES},
}
"""Slots of pages in a folder, by folder, bytes of a page and number."""
IO_S = 60.0
WORK = ("write", "read, cached", "read, from disk")


@dataclass(frozen=True, slots=True)
class MoverTime:
    """Seconds of one round, and of CPU time in it."""

    wall_s: float
    cpu_s: float


class MeasuredMover:
    """One mover over a folder of its own."""

    def __init__(self, file: MakeFile, folder: Path, page_bytes: int, num_pages: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._file = file(folder, page_bytes, num_pages)
        end = os.urandom(page_bytes - 8)
        self._pages = [slot.to_bytes(8, "big") + end for slot in range(num_pages)]
        self._digests = [page_digest(memoryview(bytearray(page)), (page_bytes,)) for page in self._pages]
        self._pages_per_read = max(1, READ_BYTES // page_bytes)
        self._ended = threading.Semaphore(0)
        self._mover = FileMover(self._file, IndexLog(folder, page_bytes, 1), (page_bytes,), self._ended.release)
        self.name = self._file.mover

    def write(self) -> None:
        """Writes every slot. Raises `OSError`."""
        for slot, (page, digest) in enumerate(zip(self._pages, self._digests, strict=True)):
            self._mover.write(SlotEntry(slot, PageKey(slot.to_bytes(KEY_BYTES, "big")), None, digest), page)
        for _ in self._pages:
            self._wait()
        for one in self._mover.take_ended():
            if isinstance(one, EndedWrite) and one.error is not None:
                raise one.error

    def read(self) -> None:
        """Reads every slot, one read after another. Raises `OSError` if a page is missing or another."""
        for first in range(0, len(self._pages), self._pages_per_read):
            expected = self._digests[first : first + self._pages_per_read]
            self._mover.read(first, range(first, first + len(expected)))
            self._wait()
            for one in self._mover.take_ended():
                if not isinstance(one, EndedRead):
                    continue
                if [None if page is None else page[1] for page in one.pages] != expected:
                    raise OSError("a page was not read as it was written")

    def drop_from_cache(self) -> None:
        """Writes the files to the disk and drops them from the page cache."""
        for path in self._folder.glob("seg-*"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        self._mover.close(IO_S)

    def _wait(self) -> None:
        if not self._ended.acquire(timeout=IO_S):
            raise OSError(f"no page was moved within {IO_S} s")


def measure(work: Callable[[], None]) -> MoverTime:
    """Wall and CPU time of `work`."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return MoverTime(time.perf_counter() - wall_s, time.process_time() - cpu_s)


@contextmanager
def benches(directory: Path, page_bytes: int, num_pages: int) -> Iterator[Sequence[MeasuredMover]]:
    """One of each kind that this machine has; segments are made and written."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        made: list[MeasuredMover] = []
        try:
            for name, file in KINDS.items():
                with suppress(ImportError, LinkBroken):
                    made.append(MeasuredMover(file, Path(folder) / name, page_bytes, num_pages))
                    made[-1].write()
            yield made
        finally:
            for bench in made:
                bench.close()


def table(directory: Path, page_bytes: int, num_pages: int, num_rounds: int) -> list[str]:
    """Medians as lines of a Markdown table."""
    found: dict[tuple[str, str], list[MoverTime]] = defaultdict(list)
    with benches(directory, page_bytes, num_pages) as made:
        for number in range(num_rounds):
            for bench in made if number % 2 else made[::-1]:
                found[bench.name, WORK[0]].append(measure(bench.write))
                found[bench.name, WORK[1]].append(measure(bench.read))
                bench.drop_from_cache()
                found[bench.name, WORK[2]].append(measure(bench.read))
        names = [bench.name for bench in made]
    gb = page_bytes * num_pages / 1e9
    lines = ["| mover | work | GB/s | CPU s a GB |", "|---|---|---|---|"]
    for name in names:
        for work in WORK:
            times = found[name, work]
            wall_s = statistics.median(one.wall_s for one in times)
            cpu_s = statistics.median(one.cpu_s for one in times)
            lines.append(f"| {name} | {work} | {gb / wall_s:.1f} | {cpu_s / gb:.2f} |")
    return lines


def main() -> None:
    """Prints the table of one directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--page-kib", type=int, default=192)
    parser.add_argument("--mib", type=int, default=256, help="of pages, for each mover")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    page_bytes = options.page_kib * 1024
    print("\n".join(table(options.directory, page_bytes, options.mib * 1024 * 1024 // page_bytes, options.rounds)))


if __name__ == "__main__":
    main()
