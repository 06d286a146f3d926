"""Pages that a decode worker gives to other workers' caches: commands of the Handoff service to its exports. Pure."""

from __future__ import annotations

from baton.domain.errors import BatonError
from baton.engine.handoff.cached_exports import CachedExports
from baton.engine.handoff.export_commands import (
    CommitExport,
    ExportCommand,
    OpenExport,
    ReleaseExport,
    RenewalAnswer,
    RenewLeases,
)
from baton.engine.handoff.kv_export import ExportTable
from baton.services.decode.effects import DecodeEffect
from baton.services.decode.import_policy import ImportPolicy


class PageExports:
    """Exports of one decode engine. Wrong pages that it finds end the attempts that hold them, as others do."""

    def __init__(self, exports: ExportTable, cached: CachedExports, import_policy: ImportPolicy) -> None:
        self._exports = exports
        self._cached = cached
        self._import_policy = import_policy

    def __len__(self) -> int:
        return len(self._exports)

    def handle(self, command: ExportCommand, now: float) -> list[DecodeEffect]:
        """Obeys and replies."""
        match command:
            case OpenExport():
                return self._open(command, now)
            case RenewLeases(ids, reply, seen):
                ended = self._exports.renew(ids, now)
                reply.send(RenewalAnswer(tuple(ended), *self._import_policy.quarantine.since(seen)))
                return []
            case CommitExport(id, commit_reply):
                commit_reply.send(self._exports.commit(id))
                return []
            case ReleaseExport(id, _, suspects, verdict_reply):
                verdict, wrong = self._cached.examine(id, suspects)
                self._exports.release(id)
                if verdict_reply is not None:
                    verdict_reply.send(verdict)
                return self._import_policy.on_wrong_pages(wrong, now)

    def expire(self, now: float) -> None:
        """Ends exports whose lease ran out, and those with a quarantined page."""
        self._exports.expire(now)
        for id in self._exports.condemned():
            self._exports.release(id)

    def next_deadline(self) -> float | None:
        """Time at which the first lease runs out."""
        return self._exports.next_deadline()

    def _open(self, command: OpenExport, now: float) -> list[DecodeEffect]:
        effects = self._import_policy.on_wrong_pages(self._cached.find_wrong(command.keys), now)
        id, policy = command.id, self._import_policy
        try:
            chunk = self._cached.open(id, command.keys, command.first_page, now, policy.limits_of_next_attempt(id, now))
            if chunk.pages:
                policy.on_given(id)
            command.reply.send(chunk)
        except BatonError as error:
            command.reply.send(error)
        return effects
