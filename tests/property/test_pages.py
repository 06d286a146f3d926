"""Settled pages under damage, D1-D6; and planted bugs that the machine must find."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from baton.domain.errors import BatonError
from baton.domain.ids import PageId, PageKey
from baton.kv.page_checks import PageChecks
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.prompt import Prompt
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from baton.transfer.digest import page_digest
from tests.property.machines.damaged_prefill_machine import DamagedPrefillMachine
from tests.property.machines.pages_machine import PagesMachine
from tests.tiny_workers import PLANTED_BUG_SETTINGS, REPEATABLE_SETTINGS


def test_settled_pages_under_damage():
    run_state_machine_as_test(PagesMachine, settings=REPEATABLE_SETTINGS)


class KeepsSubtree(PrefixCache):
    """Quarantines the leaves of a wrong page's subtree only if it is a leaf itself; keeps its descendants otherwise."""

    def quarantine(self, key: PageKey) -> list[PageKey]:
        taken = self._subtree(key) if key in self._nodes else []
        for child in taken:
            if self._nodes[child].parent == key:
                self._nodes[child].parent = None
                self._nodes[key].num_children -= 1
        return super().quarantine(key)


class MatchesUnchecked(PageChecks):
    """Uses matched pages as they are."""

    def select(self, pages: Sequence[PageId]) -> list[PageId]:
        return []


class HashesAtPublish(PagesMachine):
    """Announces the digest of the bytes as they are now."""

    def announce(self, page: PageId) -> int:
        return page_digest(self.memory.page(page))


class SettlesAgain(PrefixCache):
    """Takes a fresh digest of pages that are matched."""

    def touch(self, keys: Sequence[PageKey]) -> None:
        super().touch(keys)
        assert self.hasher is not None
        for key in keys:
            if key in self._nodes:
                page = self._nodes[key].page
                self.pool.digests._digests[page] = self.hasher.digests([page])[0]


class SubtreeKept(PagesMachine):
    prefix_cache = KeepsSubtree


class MatchUnchecked(PagesMachine):
    page_checks = MatchesUnchecked


class SettledAgain(PagesMachine):
    prefix_cache = SettlesAgain


class KeepsExports(PrefillScheduler):
    """Leaves an export open that holds a condemned page."""

    def _end_condemned(self) -> list[PrefillEffect]:
        return []


class StartsUnchecked(PrefillScheduler):
    """Starts prompts on matched pages as they are."""

    def _match(self, prompt: Prompt, now: float) -> int:
        return prompt.table.match_tokens(prompt.request.tokens[:-1])


def damaged(scheduler: type[PrefillScheduler]) -> type[DamagedPrefillMachine]:
    """The machine of a prefill worker with a planted bug."""
    return type(scheduler.__name__, (DamagedPrefillMachine,), {"prefill_scheduler": scheduler})


PLANTED = [
    SubtreeKept,
    MatchUnchecked,
    HashesAtPublish,
    SettledAgain,
    *map(damaged, (KeepsExports, StartsUnchecked)),
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", PLANTED)
def test_the_machine_finds_a_planted_bug(machine: type[RuleBasedStateMachine]):
    with pytest.raises((AssertionError, BatonError)):
        run_state_machine_as_test(machine, settings=PLANTED_BUG_SETTINGS)
