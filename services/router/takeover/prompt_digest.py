"""Tells whether a call that is parsed again has the prompt of its first owner. Used by `resume` and `takeover`.

Routers with other files do not claim a call (`text_digest`). This finds what files do not show: another release of a
library that renders or tokenises, or a model whose files are not known.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b

from baton.domain.ids import RequestId
from baton.services.router.edge.http_errors import ForeignCall
from baton.services.router.openai.valid_request import ValidRequest
from baton.store.store import CallRecord

RETRY_AFTER_S = 1.0
"""Of such a call: the next try may reach a router that renders its prompt."""

MAX_KNOWN = 4096


class PromptReplaced(ForeignCall):
    """This router makes another prompt of the call than its first owner did."""

    code = "prompt_changed"


def prompt_digest(call: ValidRequest) -> str:
    """BLAKE2b-128 of the token ids of the prompts."""
    digest = blake2b(digest_size=16)
    for prompt in call.prompts:
        digest.update(len(prompt).to_bytes(8, "little"))
        digest.update(array("I", prompt).tobytes())
    return digest.hexdigest()


def check_prompt(call: ValidRequest, record: CallRecord) -> None:
    """Raises `PromptReplaced` if `call` has other prompts than the call of `record`; an older record does not tell."""
    if record.prompt_digest and prompt_digest(call) != record.prompt_digest:
        why = f"this router makes another prompt of request {record.id} than the router that began it: try again"
        raise PromptReplaced(why, retry_after_s=RETRY_AFTER_S)


class ForeignCalls:
    """The calls that this router must not continue: of other text files, or those whose prompt it makes anew."""

    def __init__(self, text_digest: str) -> None:
        """`text_digest`: of this router's model; "" for an unknown one."""
        self._text_digest = text_digest
        self._changed: OrderedDict[RequestId, None] = OrderedDict()

    def add(self, id: RequestId) -> None:
        """Notes a call whose prompt this router makes anew; of many the oldest are forgotten, and found again."""
        self._changed[id] = None
        while len(self._changed) > MAX_KNOWN:
            self._changed.popitem(last=False)

    def error(self, record: CallRecord, retry_after_s: float) -> ForeignCall | None:
        """The error for a client whose call nobody continues; None for a call that this router may continue."""
        if record.id in self._changed:
            why = f"routers here make another prompt of request {record.id} than the one that began it"
            return PromptReplaced(f"{why}, and none continues it: try again", retry_after_s=retry_after_s)
        if record.text_digest and self._text_digest not in ("", record.text_digest):
            why = f"request {record.id} began on routers with another tokenizer or chat template"
            return ForeignCall(f"{why}, and none continues it: try again", retry_after_s=retry_after_s)
        return None
