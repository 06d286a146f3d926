"""Delivers the decode engine's effects: to the routers' streams and to the prefill workers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from baton.engine.handoff.import_effects import AbortHandoff, AskVerdict, ConfirmCommit
from baton.engine.messages import Fail, Scored
from baton.services.decode.effects import AskCommit, EmitTokens, OutwardEffect, ReportImported
from baton.services.decode.handoff_client import HandoffClient
from baton.services.decode.serving.attempts import DecodeStreamEvent
from baton.transfer.base import PullEvent, PullOutcome
from baton.worker.handoff.links import PeerLinks
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.streams import AttemptStreams


class DecodeOutbox:
    """Takes the effects of a turn into the asyncio loop with one call."""

    def __init__(
        self,
        streams: AttemptStreams[DecodeStreamEvent],
        handoffs: HandoffClient,
        links: PeerLinks,
        recent: RecentAttempts,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._handoffs = handoffs
        self._links = links
        self._recent = recent

    def emit(self, effects: list[OutwardEffect]) -> None:
        """Schedules the delivery of effects. Called from the engine thread; never blocks."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._perform, effects)

    def record_pull(self, event: PullEvent) -> None:
        """Records a pull's metrics. Called from the transfer thread."""
        if event.outcome is not PullOutcome.LATE:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._links.observe_pull, event.pull.source, event)

    def _perform(self, effects: list[OutwardEffect]) -> None:
        for effect in effects:
            if type(effect) is EmitTokens and effect.finish is None:  # of almost all
                self._streams.deliver(effect.id, effect)
                continue
            match effect:
                case EmitTokens(id, _, _, times):
                    self._recent.add(id, times)
                    self._streams.deliver(id, effect)
                case Scored(id):
                    self._streams.deliver(id, effect)
                case AskCommit(id):
                    self._handoffs.commit(id, wants_reply=True)
                case ConfirmCommit(id):
                    self._handoffs.commit(id, wants_reply=False)
                case AbortHandoff(id):
                    self._handoffs.abort(id)
                case AskVerdict(id, _, suspects, message):
                    self._handoffs.ask_verdict(id, suspects, message)
                case ReportImported():
                    self._report(effect)
                case Fail(id, error, times):
                    self._recent.add(id, times, error.code)
                    self._streams.deliver(id, effect)

    def _report(self, effect: ReportImported) -> None:
        links, source = self._links, effect.source
        times = replace(effect.times, transport=links.transport(source), path=links.path(source))
        links.observe_import(source, times)
        self._recent.add(effect.id, times)
        self._streams.deliver(effect.id, replace(effect, times=times))
