"""Planted bugs in latent pages and in window slots; parts of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

LATENT = "latent pages"
LATENT_FILE = "baton/model/attention/latent.py"
UNIT = "tests/unit/model/attention/test_latent.py"

LATENT_BUGS = (
    PlantedBug(
        LATENT,
        "sums are not rescaled by a new maximum",
        LATENT_FILE,
        "self._sums[:, tile] * kept +",
        "self._sums[:, tile] +",
        UNIT,
    ),
    PlantedBug(
        LATENT,
        "a query sees one key too many",
        LATENT_FILE,
        "seen > positions",
        "seen > positions + 1",
        UNIT,
    ),
    PlantedBug(
        LATENT,
        "absorbed rows keep the offsets of the whole step",
        LATENT_FILE,
        "replace(segment, offset=len(places))",
        "segment",
        UNIT,
    ),
    PlantedBug(
        LATENT,
        "a layer's row begins at the page's first byte",
        "baton/kv/geometry.py",
        "at, latent_at = 0, self.group.sharded_elements_per_token * self.page_size",
        "at, latent_at = 0, 0",
        "tests/unit/kv/test_geometry.py",
    ),
    PlantedBug(
        LATENT,
        "modules keep latents when they must expand them",
        LATENT_FILE,
        'vars(module).pop("expand_kv", None)',
        "pass",
        UNIT,
    ),
)

WINDOWS = "window slots"
SLOTS, TABLE = "baton/kv/windows/slots.py", "baton/kv/page_table.py"
SLOT_UNIT, PROPERTY = "tests/unit/kv/windows/test_slots.py", "tests/property/windows/test_window_slots.py"

WINDOW_BUGS = (
    PlantedBug(
        WINDOWS,
        "a window part is given back a page too early",
        TABLE,
        "first = min(self.cache.window.first_page(position), self._held.stop)",
        "first = min(self.cache.window.first_page(position) + 1, self._held.stop)",
        SLOT_UNIT,
    ),
    PlantedBug(
        WINDOWS,
        "slots that are asked for again are evicted for the others",
        SLOTS,
        "len(self._free) + len(self._unheld) - num_kept",
        "len(self._free) + len(self._unheld)",
        SLOT_UNIT,
    ),
    PlantedBug(
        WINDOWS,
        "a branch goes before the ends of sequences",
        SLOTS,
        "if passed and not self._is_branch[page]:",
        "if passed:",
        SLOT_UNIT,
    ),
    PlantedBug(
        WINDOWS,
        "a lost window part stays in the digest",
        "baton/kv/page_digests.py",
        "self._digests[page] = without_window(self._digests[page], self._num_parts)",
        "pass",
        SLOT_UNIT,
    ),
    PlantedBug(
        WINDOWS,
        "a duplicate keeps its slot",
        "baton/kv/prefix_cache.py",
        "self.pool.windows.replace(page, node.page)",
        "self.pool.windows.drop([page])",
        SLOT_UNIT,
    ),
    PlantedBug(
        WINDOWS,
        "exports do not hold the window parts that decode reads",
        "baton/engine/handoff/kv_export.py",
        "self._pool.windows.hold(windowed)",
        "windowed = ()",
        PROPERTY,
    ),
    PlantedBug(
        WINDOWS,
        "a prompt computed on decode holds what its import would read",
        "services/decode/import_table.py",
        "kv_import.table.reach_back(kv_import.prefix_len)",
        "pass",
        "tests/unit/decode/test_window_slots.py",
    ),
    PlantedBug(
        WINDOWS,
        "window parts are read from the pages' own numbers",
        "baton/transfer/nixl_mover.py",
        "theirs = pull.remote_windows[part] if link.windows is not None else remote_pages",
        "theirs = remote_pages",
        "tests/unit/transfer/leading/test_window_slots.py",
    ),
    PlantedBug(
        WINDOWS,
        "items of a post are ordered on one side only",
        "baton/transfer/nixl_mover.py",
        "return ours[order], theirs[order]",
        "return ours, theirs[order]",
        "tests/unit/transfer/test_nixl_mover.py",
    ),
    PlantedBug(
        WINDOWS,
        "what a page of a step has not filled keeps the values of the slot's last page",
        "baton/model/attention/window_slots.py",
        "storage.clear_windows(step.of(is_apart=True).partial_pages)",
        "pass",
        "tests/unit/model/attention/test_window_slots.py",
    ),
)
