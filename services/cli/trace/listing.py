"""The requests of `baton trace --last N` and `--slowest N`, as a router lists them. Pure but for `read_listing`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import httpx2
import msgspec

from baton.domain.errors import BatonError
from baton.services.router.cluster.snapshot import ListOrder, RecentRequest, RecentRequests

MAX_LISTED = 200
"""A router lists no more."""

_HEAD = ("ENDED", "ID", "OUTCOME", "TTFT", "E2E", "PROMPT", "CACHED", "OUT", "TRIES", "WORKERS", "ROUTER")
_RIGHT = frozenset({"TTFT", "E2E", "PROMPT", "CACHED", "OUT", "TRIES"})


class RequestsUnreadable(BatonError):
    """The router gave no list of requests."""

    code = "requests_unreadable"


async def read_listing(client: httpx2.AsyncClient, router: str, order: ListOrder, count: int) -> list[RecentRequest]:
    """At most `count` requests that ended, the first of them first. Raises `RequestsUnreadable`."""
    url = f"{router.rstrip('/')}/v1/cluster/requests"
    try:
        answer = await client.get(url, params={"limit": count, "order": order.value})
    except httpx2.TransportError as error:
        raise RequestsUnreadable(f"{router} does not answer ({type(error).__name__}). Use --router.") from None
    if answer.status_code == httpx2.codes.UNAUTHORIZED:
        raise RequestsUnreadable(f"{router} wants an API key: set BATON_API_KEY")
    if answer.status_code != httpx2.codes.OK:
        raise RequestsUnreadable(f"{url}: HTTP {answer.status_code}: {answer.text[:200]}")
    try:
        return msgspec.json.decode(answer.content, type=RecentRequests).data
    except msgspec.DecodeError as error:
        raise RequestsUnreadable(f"{router} answers in another version's form: {error}") from None


def listing_lines(requests: Sequence[RecentRequest], *, as_json: bool) -> list[str]:
    """A table with a head, times in UTC; or one line of JSON."""
    if as_json:
        return [msgspec.json.encode(requests).decode()]
    if not requests:
        return ["no request has ended at this router yet"]
    rows = [_HEAD, *(_row(each) for each in requests)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        text.rjust(width) if name in _RIGHT else text.ljust(width)
        for name, text, width in zip(_HEAD, row, widths, strict=True)
    ]


def _row(request: RecentRequest) -> tuple[str, ...]:
    ended = datetime.fromtimestamp(request.at_ms / 1000, UTC)
    outcome = request.outcome + (f" ({request.code})" if request.code else "")
    numbers = (request.prompt_tokens, request.cached_tokens, request.output_tokens, request.attempts)
    workers = f"{request.prefill or '-'} > {request.decode or '-'}"
    times = (_time(request.ttft_ms), _time(request.e2e_ms))
    return (f"{ended:%H:%M:%S}", request.id, outcome, *times, *map(str, numbers), workers, request.router)


def _time(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"
