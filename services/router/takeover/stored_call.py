"""Parses a stored call again. Used by `resume` and `takeover`, which go on with calls of other routers."""

from __future__ import annotations

from baton.domain.errors import ConstraintFailed, ContextOverflow, InvalidRequest, ModelNotFound
from baton.services.router.openai.request_parser import ParsedRequest, RawRequest, RequestParser
from baton.services.router.openai.validation import RequestMetadata
from baton.services.router.takeover.prompt_digest import RETRY_AFTER_S, PromptReplaced, check_prompt
from baton.store.store import CallRecord

UNREADABLE = (InvalidRequest, ContextOverflow, ConstraintFailed, ModelNotFound)
"""What a router says to a body that it does not take. Its first owner took it: that router has other software or
settings. Not what passes by itself, like `Overloaded`."""


def raw_request_of(record: CallRecord) -> RawRequest:
    """The raw request of a stored call."""
    metadata = RequestMetadata(record.id, record.created_s, record.seed, record.tenant, record.private)
    return RawRequest(record.endpoint, record.body, metadata, stored=True)


async def parse_stored(parser: RequestParser, record: CallRecord) -> ParsedRequest:
    """The call as its first owner parsed it.

    Raises `PromptReplaced` if this router makes another prompt of it, or none; an older record does not tell, and its
    body raises one of `UNREADABLE`. Raises `Overloaded` if images have no place now.
    """
    try:
        parsed = await parser.parse(raw_request_of(record))
    except UNREADABLE as error:
        if not record.prompt_digest:
            raise
        why = f"this router cannot read request {record.id} as the router that began it ({error}): try again"
        raise PromptReplaced(why, retry_after_s=RETRY_AFTER_S) from None
    check_prompt(parsed.request, record)
    return parsed
