"""Compiles the constraints of requests beside the event loop, before the engine gets them. Called by servicers."""

from __future__ import annotations

import asyncio

from baton.domain.errors import InvalidRequest
from baton.domain.request import EngineRequest
from baton.engine.masks import MaskFiller


async def prepare_constraint(masks: MaskFiller | None, request: EngineRequest) -> None:
    """Returns at once for a request without a constraint. Raises `ConstraintFailed`, or `InvalidRequest` without masks:
    such a worker would answer unconstrained.
    """
    if request.constraint is None:
        return
    if masks is None:
        raise InvalidRequest("this worker cannot constrain output", param="constraint")
    await asyncio.to_thread(masks.prepare, request)
