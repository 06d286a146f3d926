"""Rows and room of the workers, as their records tell. Pure; called by `workers` at each reading of the registry."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.domain.ids import Incarnation
from baton.domain.timing.row_limit import row_objective, within_tpot
from baton.domain.worker import WorkerRecord
from baton.services.router.admission.credits import DecodeRoom, PrefillRoom
from baton.services.router.dispatch.placement.pair import Pair


def find_rooms(pairs: Iterable[Pair], max_tpot_s: float = math.inf) -> list[DecodeRoom]:
    """The rooms of the decode workers of `pairs`, in their order. `max_tpot_s`: the objective; none by default."""
    prefills: dict[Incarnation, PrefillRoom] = {}
    rooms: dict[Incarnation, DecodeRoom] = {}
    for pair in pairs:
        decode = pair.decode
        room = rooms.get(decode.incarnation)
        if room is None:
            room = rooms[decode.incarnation] = _decode_room(decode, max_tpot_s)
        if pair.local:
            room.local = True
        else:
            prefill = prefills.setdefault(pair.prefill.incarnation, _prefill_room(pair.prefill))
            room.prefills = (*room.prefills, prefill)
    return list(rooms.values())


def rows_within(pairs: Iterable[Pair], max_tpot_s: float, context_tokens: float) -> int | None:
    """Rows of the decode workers of `pairs` within an objective on the time between tokens; None without a pair.

    `context_tokens`: those of a row that may come.
    """
    decodes = {pair.decode.incarnation: pair.decode for pair in pairs}.values()
    bounded = (within_tpot(one, max_tpot_s, context_tokens) for one in decodes)
    return sum(one.budgets.rows for one in bounded) if decodes else None


def _decode_room(record: WorkerRecord, max_tpot_s: float) -> DecodeRoom:
    """A reservation has a row before it runs, and its context is that of the pages that are not available."""
    load, budgets = record.load, record.budgets
    num_rows = budgets.rows - load.running_rows - load.waiting_requests
    if budgets.reservations is not None:
        num_rows = min(num_rows, budgets.reservations - load.waiting_requests)
    objective = row_objective(record, max_tpot_s)
    if objective is not None:
        objective.num_rows = load.running_rows + load.waiting_requests
        objective.context_tokens = record.page_size * (load.total_pages - load.available_pages)
    return DecodeRoom(num_rows, load.available_pages, load.total_pages, record.page_size, objective=objective)


def _prefill_room(record: WorkerRecord) -> PrefillRoom:
    """Images that wait count as tokens there and take no pages, so a worker that encodes them is taken to have room."""
    load = record.load
    num_tokens = math.inf if load.media.max_bytes else load.available_pages * record.page_size - load.waiting_tokens
    return PrefillRoom(num_tokens, load.waiting_requests)
