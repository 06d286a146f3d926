"""Client of other workers' Handoff services for cached pages: asks for exports, and performs an import's effects."""

from __future__ import annotations

from baton.domain.errors import BatonError
from baton.engine.handoff.import_commands import ExportAnswer, PageImportMailbox
from baton.engine.handoff.import_effects import AbortHandoff, AskExport, AskVerdict, ConfirmCommit
from baton.rpc import codec
from baton.rpc.gen import handoff_pb2
from baton.rpc.request_metadata import request_metadata
from baton.telemetry.logs import get_logger
from baton.worker.handoff.handoff_calls import CALL_TIMEOUT_S, HandoffCalls, OpenHandoff, decode_chunk
from baton.worker.handoff.links import PeerLinks
from baton.worker.handoff.session_or_call import ASK_ERRORS, error_of

log = get_logger()


class ExportClient(HandoffCalls):
    """Runs one task per question, besides those of `HandoffCalls`."""

    def __init__(
        self, links: PeerLinks, mailbox: PageImportMailbox, renew_interval_s: float, num_page_parts: int = 1
    ) -> None:
        """See `HandoffCalls`."""
        super().__init__(links, mailbox, renew_interval_s, num_page_parts)
        self._mailbox = mailbox

    def perform(self, effect: AskExport | ConfirmCommit | AbortHandoff | AskVerdict) -> None:
        """Starts what an effect asks for; answers come as commands."""
        match effect:
            case AskExport():
                self._spawn(self._ask(effect))
            case ConfirmCommit(id):
                self.commit(id, wants_reply=False)
            case AbortHandoff(id):
                self.abort(id)
            case AskVerdict(id, _, suspects, message):
                self.ask_verdict(id, suspects, message)

    async def _ask(self, ask: AskExport) -> None:
        try:
            link = self._links.get(ask.source, ask.incarnation)
            handoff = OpenHandoff(link, request_metadata(ask.id), leased=True)
            request = handoff_pb2.OpenExportRequest(
                id=codec.encode_id(ask.id), incarnation=ask.incarnation, page_keys=ask.keys, first_page=ask.first_page
            )
            stub = self._links.stub(link)
            reply = await stub.OpenExport(request, timeout=CALL_TIMEOUT_S, metadata=handoff.metadata)
            if reply.WhichOneof("reply") != "chunk":
                raise codec.decode_failure(reply.refused)
            if reply.chunk.pages:
                self._open[ask.id] = handoff  # the pages are pinned there until a commit, an abort or the lease's end
            self._mailbox.put(ExportAnswer(ask.id, decode_chunk(ask.id, reply.chunk, self._num_page_parts)))
        except ASK_ERRORS as error:
            self._report(ask, error_of(error))

    def _report(self, ask: AskExport, error: BatonError) -> None:
        log.info("export_refused", id=str(ask.id), source=ask.source, why=error.log_text)
        self._mailbox.put(ExportAnswer(ask.id, error))
