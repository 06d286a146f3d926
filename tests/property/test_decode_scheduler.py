"""Import policy, imports and decode scheduler under any sequence of calls; `decode_checks` has the invariants.

Each planted bug drops one rule about damaged pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, PageKey, WorkerId
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import KvImport
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.order import RowOrder
from tests.property.machines.decode_machine import DecodeMachine
from tests.tiny_workers import PLANTED_BUG_SETTINGS, REPEATABLE_SETTINGS


def test_decode_side():
    run_state_machine_as_test(
        DecodeMachine, settings=settings(REPEATABLE_SETTINGS, max_examples=100, stateful_step_count=60)
    )


class PriorityMachine(DecodeMachine):
    """Rows of low priority give way."""

    order = RowOrder(by_priority=True)


def test_decode_side_by_priority():
    run_state_machine_as_test(PriorityMachine, settings=REPEATABLE_SETTINGS)


class UsesMatchedPages(PageFaults):
    """Lets a row join over pages that were not checked."""

    def on_reserved(self, id: AttemptId) -> None:
        pass


class JoinsBeforeTheCheck(ImportTable):
    """Forgets the unchecked pages of an import that is otherwise ready."""

    def is_ready(self, id: AttemptId) -> bool:
        if (kv_import := self.get(id)) is not None:
            kv_import.unchecked = []
        return super().is_ready(id)


class SparesImports(PageFaults):
    """Leaves imports alone that read descendants of a quarantined page."""

    def _first_wrong(self, kv_import: KvImport, keys: frozenset[PageKey], source: WorkerId | None) -> int | None:
        return None


class SparesHolders(ImportPolicy):
    """Takes wrong pages out, but lets their holders run."""

    def _fail_ruined(self, ids: Sequence[AttemptId]) -> list:
        return []


def planted(**replacements: object) -> type[DecodeMachine]:
    return type("Planted", (DecodeMachine,), replacements)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(planted(page_faults=UsesMatchedPages), id="match-unchecked"),
        pytest.param(planted(import_table=JoinsBeforeTheCheck), id="join-before-check"),
        pytest.param(planted(page_faults=SparesImports), id="import-spared"),
        pytest.param(planted(import_policy=SparesHolders), id="holders-spared"),
    ],
)
def test_planted_bug_is_found(machine: type[DecodeMachine]):
    with pytest.raises((AssertionError, BatonError)):
        run_state_machine_as_test(machine, settings=PLANTED_BUG_SETTINGS)
