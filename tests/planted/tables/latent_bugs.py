"""Planted bugs in latent pages; a part of the table in `bugs`."""

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
