"""Planted bugs of writes that are sent together (docs/adr/0128)."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

_OWNERSHIP = "one owner"
_CHAINS = "tests/contract/chains"
_WRITES = "tests/unit/store/write_behind"
_SCRIPT = "baton/store/redis/scripts/write_chains.lua"

CHAIN_BUGS = (
    PlantedBug(
        _OWNERSHIP, "a chain goes on after a refused write", _SCRIPT,
        "if chain == refused then", "if false then",
        _CHAINS,
    ),
    PlantedBug(
        _OWNERSHIP, "a chain goes on under the call of another owner", _SCRIPT,
        "return reply[2] == tonumber(args[3]) and reply[3] == tonumber(args[4])", "return true",
        _CHAINS,
    ),
    PlantedBug(
        _OWNERSHIP, "a chain goes on after a gap in a journal", _SCRIPT,
        "if outcome ~= 0 then", "if false then",
        _CHAINS,
    ),
    PlantedBug(
        _OWNERSHIP, "a chain goes on after a sequence that was not put", _SCRIPT,
        "return type(reply) == 'number'", "return true",
        _CHAINS,
    ),
    PlantedBug(
        _OWNERSHIP, "a chain under way during a reset counts as written", "baton/store/write_behind/flusher.py",
        "            if reset:\n                self._queue.reset(sync)\n            else:",
        "            if False:\n                self._queue.reset(sync)\n            else:",
        _WRITES,
    ),
    PlantedBug(
        _OWNERSHIP, "a chain ends a call before all its sequences", "baton/store/write_behind/call_sync.py",
        "if self.ended and complete and self.stored is not self.desired.status:",
        "if self.ended and self.stored is not self.desired.status:",
        f"{_WRITES} tests/property/store/test_store_journal.py",
    ),
    PlantedBug(
        _OWNERSHIP, "what was not acknowledged counts as known", "baton/store/write_behind/sync_queue.py",
        "            sync.status.stale = True\n            self.update(sync)\n\n    def journal_written(",
        "            self.update(sync)\n\n    def journal_written(",
        f"{_WRITES} tests/property/store/test_store_journal.py tests/property/store/test_store_writer.py",
    ),
    PlantedBug(
        _OWNERSHIP, "a journal is written before the workers of its tokens", "baton/store/write_behind/record_sync.py",
        'if not self.ended or desired.fingerprint not in ("", stored.fingerprint):', "if not self.ended:",
        _WRITES,
    ),
    PlantedBug(
        _OWNERSHIP, "a journal of a later attempt is written before its record",
        "baton/store/write_behind/record_sync.py",
        "return stored.attempt == desired.attempt and _same_owner(stored, desired)", "return True",
        _WRITES,
    ),
    PlantedBug(
        _OWNERSHIP, "the fingerprint waits for the journal", "baton/store/write_behind/record_sync.py",
        'return _HOLD if target.fingerprint in ("", known) else _WRITE', "return _HOLD",
        _WRITES,
    ),
    PlantedBug(
        _OWNERSHIP, "headers wait for the workers of their call", "services/router/takeover/call_ownership.py",
        "            self._writer.write_new_calls()", "            pass",
        "tests/unit/router/takeover/test_call_ownership.py",
    ),
    PlantedBug(
        _OWNERSHIP, "a call without workers is never written", "baton/store/write_behind/flusher.py",
        "self._open_calls_at(now + self._options.opening_s, now)", "self._open_calls_at(math.inf, now)",
        _WRITES,
    ),
    PlantedBug(
        _OWNERSHIP, "ends go before what a full server must refuse", "baton/store/write_behind/sync_queue.py",
        "chains.sort(key=_needs_no_memory)", "pass",
        _WRITES,
    ),
    PlantedBug(
        _OWNERSHIP, "a refused call is tried again before all others", "baton/store/write_behind/sync_queue.py",
        "family = [sync, *sync.sequences.values()] if isinstance(sync, CallSync) else [sync]", "family = [sync]",
        _WRITES,
    ),
    PlantedBug(
        _OWNERSHIP, "journals that fail keep ends from their turn", "baton/store/write_behind/flusher.py",
        "if self._sync_alone_next and sync is not None and sync.status.alone:", "if False:",
        _WRITES,
    ),
)  # fmt: skip
