"""Publishes what a draft policy has counted. Called by the decode loop once a turn, on the engine thread."""

from __future__ import annotations

from baton.engine.drafts.policy import DraftTotals
from baton.telemetry import metrics


class DraftMeter:
    """Adds to the metrics what `totals` have grown by since the last time. `drafter`: the name of theirs."""

    def __init__(self, drafter: str, totals: DraftTotals) -> None:
        self._totals = totals
        self._proposals = metrics.DRAFTS_TOTAL.labels(drafter)
        self._tokens = metrics.DRAFT_TOKENS_TOTAL.labels(drafter)
        self._accepted = metrics.DRAFT_ACCEPTED_TOTAL.labels(drafter)
        self._off_chain = metrics.DRAFT_OFF_CHAIN_TOTAL.labels(drafter)
        self._accepted_at = [
            metrics.DRAFT_ACCEPTED_POSITION_TOTAL.labels(drafter, str(place))
            for place in range(len(totals.accepted_at))
        ]
        self._skipped = {reason: metrics.DRAFT_SKIPPED_TOTAL.labels(reason.value) for reason in totals.skipped}
        self._published = totals.copy()

    def publish(self) -> None:
        """Updates the metrics."""
        now, before = self._totals, self._published
        if now == before:
            return
        self._proposals.inc(now.num_proposals - before.num_proposals)
        self._tokens.inc(now.num_drafts - before.num_drafts)
        self._accepted.inc(now.num_accepted - before.num_accepted)
        self._off_chain.inc(now.num_off_chain - before.num_off_chain)
        for place, counter in enumerate(self._accepted_at):
            counter.inc(now.accepted_at[place] - before.accepted_at[place])
        for reason, counter in self._skipped.items():
            counter.inc(now.skipped[reason] - before.skipped[reason])
        self._published = now.copy()
