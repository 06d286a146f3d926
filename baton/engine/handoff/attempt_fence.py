"""The newest attempt of each request that a worker has seen. Pure."""

from __future__ import annotations

from collections import OrderedDict

from baton.domain.errors import Superseded
from baton.domain.ids import AttemptId, RequestId

_MAX_REMEMBERED = 4096
"""Requests whose newest attempt is remembered, beside those in progress."""


class AttemptFence:
    """Refuses attempts that are older than one seen."""

    def __init__(self) -> None:
        self._newest: OrderedDict[RequestId, AttemptId] = OrderedDict()

    def newest(self, request: RequestId) -> AttemptId | None:
        """The newest attempt that was seen of `request`."""
        return self._newest.get(request)

    def pass_newest(self, id: AttemptId, num_in_progress: int) -> None:
        """Remembers the newest attempt of a request. Raises `Superseded` for an older one."""
        newest = self._newest.get(id.request_id, id)
        if id.order < newest.order:
            raise Superseded(f"{id}: attempt {newest.attempt} was seen already", newest)
        self._newest[id.request_id] = id
        self._newest.move_to_end(id.request_id)
        while len(self._newest) > _MAX_REMEMBERED + num_in_progress:
            self._newest.popitem(last=False)
