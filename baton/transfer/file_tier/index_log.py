"""The index of a file tier: a log of what each slot holds, appended after the slot's bytes.

    header: magic, bytes of a page, parts of a page, crc32
    record: key, parent, slot, digests of the parts, crc32

A key of zeros stands for an empty slot, a parent of zeros for the root. Reading ends at the first record whose checksum
is wrong; the rest is cut off. The log is rewritten when most of its records are outdated. One thread writes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

from baton.domain.ids import PageKey
from baton.kv.keys import KEY_BYTES
from baton.kv.page_digests import join_parts, split_parts
from baton.kv.tiers.tier import SlotEntry

_MAGIC = b"batonft1"
_HEADER = struct.Struct("<8sQI")
_CRC = struct.Struct("<I")
_NO_KEY = bytes(KEY_BYTES)
_SPARE_RECORDS = 1024
"""Outdated records kept at least before the log is rewritten."""


class IndexLog:
    """Log of a folder. `entries` are those of an earlier process, oldest first."""

    def __init__(self, folder: Path, page_bytes: int, num_parts: int) -> None:
        """Raises `OSError`. A log of other pages, or none, is begun anew."""
        self._path = folder / "index.log"
        self._num_parts = num_parts
        self._record = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sI{num_parts}Q")
        self._record_bytes = self._record.size + _CRC.size
        self._header = _with_crc(_HEADER.pack(_MAGIC, page_bytes, num_parts))
        self._live: dict[int, bytes] = {}  # newest record of each slot that is not empty, oldest first
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = self._load()
        self.entries = [self._parse(record) for record in self._live.values()]

    def append(self, entry: SlotEntry) -> None:
        """Adds a record. Raises `OSError`; the log is then as before."""
        record = self._pack(entry)
        self._write(record, self._end)
        self._end += len(record)
        self._keep(entry.slot, None if entry.key is None else record)
        if self._num_records > 2 * len(self._live) + _SPARE_RECORDS:
            with contextlib.suppress(OSError):  # a full disk: the long log stays
                self._rewrite()

    def clear(self) -> None:
        """Forgets everything: shortening a file works on a full disk, too. Raises `OSError`."""
        os.ftruncate(self._fd, 0)
        self._live.clear()
        self._write(self._header, 0)
        self._end = len(self._header)

    def remove(self) -> None:
        """Removes the log's name: no later process reads it. Raises `OSError`."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)

    @property
    def _num_records(self) -> int:
        return (self._end - len(self._header)) // self._record_bytes

    def _load(self) -> int:
        """Reads the log; returns where the next record goes."""
        content = self._path.read_bytes()
        at = len(self._header)
        if content[:at] != self._header:
            os.ftruncate(self._fd, 0)
            self._write(self._header, 0)
            return at
        while at + self._record_bytes <= len(content):
            record = content[at : at + self._record_bytes]
            if _with_crc(record[: -_CRC.size]) != record:
                break
            entry = self._parse(record)
            self._keep(entry.slot, None if entry.key is None else record)
            at += self._record_bytes
        os.ftruncate(self._fd, at)
        return at

    def _rewrite(self) -> None:
        """Writes the live records into a new file, which then replaces the log."""
        new = self._path.with_suffix(".new")
        new.write_bytes(self._header + b"".join(self._live.values()))
        new.chmod(0o600)
        fd = os.open(new, os.O_RDWR | os.O_CLOEXEC)
        new.replace(self._path)
        os.close(self._fd)
        self._fd, self._end = fd, len(self._header) + len(self._live) * self._record_bytes

    def _keep(self, slot: int, record: bytes | None) -> None:
        self._live.pop(slot, None)
        if record is not None:
            self._live[slot] = record

    def _write(self, content: bytes, at: int) -> None:
        if os.pwrite(self._fd, content, at) != len(content):
            os.ftruncate(self._fd, at)
            raise OSError(f"{self._path} took only a part of a record")

    def _pack(self, entry: SlotEntry) -> bytes:
        parts = split_parts([entry.digest], self._num_parts)
        key, parent = entry.key or _NO_KEY, entry.parent or _NO_KEY
        return _with_crc(self._record.pack(key, parent, entry.slot, *parts))

    def _parse(self, record: bytes) -> SlotEntry:
        key, parent, slot, *parts = self._record.unpack(record[: -_CRC.size])
        if key == _NO_KEY:
            return SlotEntry(slot, None)
        above = None if parent == _NO_KEY else PageKey(parent)
        return SlotEntry(slot, PageKey(key), above, join_parts(parts, self._num_parts)[0])


def _with_crc(content: bytes) -> bytes:
    return content + _CRC.pack(zlib.crc32(content))
