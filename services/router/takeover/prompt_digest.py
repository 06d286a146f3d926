"""Tells whether a call that is parsed again has the prompt of its first owner. Used by `stored_call`.

Routers with other files do not claim a call (`text_digest`). This finds what files do not show: another release of a
library that renders or tokenises, or a model whose files are not known.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from baton.services.router.edge.http_errors import ForeignCall
from baton.services.router.openai.valid_request import ValidRequest
from baton.store.store import CallRecord

RETRY_AFTER_S = 1.0
"""Of such a call: the next try may reach a router that renders its prompt."""


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
