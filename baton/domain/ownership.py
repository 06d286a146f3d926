"""The role of a router towards one call as a table `(role, event) -> role`. Printed into `docs/protocol.md`.

`superseded` changes a role. It never ends a request: an owner with a higher ballot answers it, or this router claims
it.
"""

from __future__ import annotations

import enum

from baton.domain.errors import Broken


class CallRole(enum.Enum):
    """Role of a router.

    OWNER: it runs the attempts. DOUBTFUL: a worker has seen a higher ballot that the store has not shown. READER: it
    follows the journal of another owner. CLAIMING: it asks the store for the call. OVER: the call has ended for it.
    """

    OWNER = "owner"
    DOUBTFUL = "doubtful"
    READER = "reader"
    CLAIMING = "claiming"
    OVER = "over"


class RoleEvent(enum.Enum):
    """Events of a role.

    STORE_NEWER: the store shows a ballot above mine, or one that was seen. WORKER_NEWER, WORKER_MINE: a worker refuses
    an attempt for one with a higher ballot, or with mine. UNATTENDED: abandoned, or mine without my knowledge.
    PATIENCE: for the patience the call was missing, or its ballot below one seen. GRANTED, DENIED: the answer to a
    claim. LOST: missing for the patience, and no copy to enter again.
    """

    STORE_NEWER = "store_newer"
    WORKER_NEWER = "worker_newer"
    WORKER_MINE = "worker_mine"
    UNATTENDED = "unattended"
    PATIENCE = "patience"
    GRANTED = "granted"
    DENIED = "denied"
    ENDS = "ends"
    LOST = "lost"
    DEADLINE = "deadline"


_R, _E = CallRole, RoleEvent

ROLES: dict[tuple[CallRole, RoleEvent], CallRole] = {
    (_R.OWNER, _E.WORKER_MINE): _R.OWNER,  # its next attempt is above the one seen
    (_R.OWNER, _E.STORE_NEWER): _R.READER,
    (_R.OWNER, _E.WORKER_NEWER): _R.DOUBTFUL,
    (_R.OWNER, _E.ENDS): _R.OVER,
    (_R.DOUBTFUL, _E.WORKER_NEWER): _R.DOUBTFUL,
    (_R.DOUBTFUL, _E.STORE_NEWER): _R.READER,
    (_R.DOUBTFUL, _E.PATIENCE): _R.CLAIMING,
    (_R.DOUBTFUL, _E.ENDS): _R.OVER,
    (_R.DOUBTFUL, _E.LOST): _R.OVER,
    (_R.READER, _E.STORE_NEWER): _R.READER,
    (_R.READER, _E.WORKER_NEWER): _R.DOUBTFUL,
    (_R.READER, _E.UNATTENDED): _R.CLAIMING,
    (_R.READER, _E.PATIENCE): _R.CLAIMING,
    (_R.READER, _E.ENDS): _R.OVER,
    (_R.READER, _E.LOST): _R.OVER,
    (_R.CLAIMING, _E.GRANTED): _R.OWNER,
    (_R.CLAIMING, _E.DENIED): _R.READER,
    **{(role, _E.DEADLINE): _R.OVER for role in _R if role is not _R.OVER},
}


def change_role(role: CallRole, event: RoleEvent) -> CallRole:
    """The role after `event`. Raises `Broken` for a pair that is not in the table."""
    try:
        return ROLES[role, event]
    except KeyError:
        raise Broken(f"a router that is {role.value} of a call cannot {event.value}") from None
