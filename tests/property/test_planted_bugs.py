"""Planted bugs that the state machines must find: each is a subclass with one rule removed."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from baton.domain.errors import BatonError
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId
from baton.engine.batch import Batch, HostCopy, StepOutput
from baton.engine.handoff.kv_export import ExportTable
from baton.services.decode.effects import DecodeEffect
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import SealInfo
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.prefill.prompt import Prompt
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from tests.property.machines.decode_machine import DecodeMachine
from tests.property.machines.prefill_machine import PrefillMachine
from tests.property.machines.split_machine import SplitMachine
from tests.simulation.planted_bugs import CommitsDuringReads, FreesDuringReads, ReservesPagesTwice, UnpinsBeforeCommit
from tests.tiny_workers import PLANTED_BUG_SETTINGS

pytestmark = pytest.mark.slow


class NeverUnpins(ExportTable):
    """Keeps the pins of committed pages for ever."""

    def commit(self, id: AttemptId) -> bool:
        if id in self._open:
            self._open[id].pages = []
        return super().commit(id)


class PinsOnlyMissingPages(PrefillScheduler):
    """Pins a page without the one before it, whose eviction then never ends."""

    def _publish(self, prompt: Prompt, now: float) -> list[PrefillEffect]:
        prompt.num_pinned = max(prompt.num_pinned, prompt.num_published)
        return super()._publish(prompt, now)


class PublishesUnfinishedPages(PrefillScheduler):
    """Publishes the page that the next chunk will write."""

    def _publish(self, prompt: Prompt, now: float) -> list[PrefillEffect]:
        effects = super()._publish(prompt, now)
        if prompt.num_remaining and len(prompt.table.pages) > prompt.num_published:
            page = prompt.table.pages[prompt.num_published]
            self._exports.publish(prompt.request.id, [page], now)
            effects.append(PublishedChunk(prompt.request.id, prompt.num_published, (page,)))
            prompt.num_published += 1
            prompt.num_pinned += 1
        return effects


class CommitsUnannouncedPages(ImportTable):
    """Accepts a seal before all pages were published."""

    def on_seal(self, id: AttemptId, seal: SealInfo, now: float) -> None:
        kv_import = self._imports.get(id)
        if kv_import is not None:
            kv_import.num_published = kv_import.num_prompt_pages(self.limits.page_size)
        super().on_seal(id, seal, now)


class SkipsFencing(ImportTable):
    """Accepts an attempt that is older than one seen."""

    def fence(self, id: AttemptId) -> None:
        return


class KeepsOlderAttempts(ImportPolicy):
    """Keeps the older attempt running beside the newer one."""

    def _abort_older(self, id: AttemptId) -> list[DecodeEffect]:
        return []


class EmitsTwice(DecodeScheduler):
    """Emits the last token of a step twice."""

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[DecodeEffect]:
        effects = super().commit(batch, output, now)
        return [*effects, *effects[-1:]]


class SkipsHostCopies(DecodeScheduler):
    """Resumes a preempted row without copying its pages back."""

    def _resume(self, copies: list[HostCopy], now: float) -> None:
        super()._resume([], now)


def planted(machine: type[RuleBasedStateMachine], **replacements: object) -> type[RuleBasedStateMachine]:
    return type(f"Broken{machine.__name__}", (machine,), replacements)


@pytest.mark.parametrize(
    "machine",
    [
        planted(PrefillMachine, export_table=UnpinsBeforeCommit),
        planted(SplitMachine, export_table=UnpinsBeforeCommit, may_check_digests=False),
        planted(PrefillMachine, export_table=NeverUnpins),
        planted(PrefillMachine, prefill_scheduler=PinsOnlyMissingPages),
        planted(PrefillMachine, prefill_scheduler=PublishesUnfinishedPages),
        planted(DecodeMachine, import_table=CommitsDuringReads),
        planted(SplitMachine, import_table=CommitsDuringReads),
        planted(DecodeMachine, import_table=CommitsUnannouncedPages),
        planted(DecodeMachine, import_table=FreesDuringReads),
        planted(DecodeMachine, import_table=ReservesPagesTwice),
        planted(DecodeMachine, import_table=SkipsFencing),
        planted(DecodeMachine, import_policy=KeepsOlderAttempts),
        planted(DecodeMachine, decode_scheduler=EmitsTwice),
        planted(SplitMachine, decode_scheduler=EmitsTwice),
        planted(DecodeMachine, decode_scheduler=SkipsHostCopies),
    ],
    ids=lambda machine: "-".join([machine.__name__, *(v.__name__ for v in vars(machine).values() if type(v) is type)]),
)
def test_planted_bug_is_found(machine: type[RuleBasedStateMachine]):
    with pytest.raises((AssertionError, BatonError)):
        run_state_machine_as_test(machine, settings=PLANTED_BUG_SETTINGS)
