"""The hash fields of a call's end, which every end of a call has with it."""

from __future__ import annotations

import pytest

from baton.domain.ids import RequestId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.store import transitions
from baton.store.redis.record_codec import RecordFormat
from baton.store.redis.unsealed_log import UnsealedLog
from baton.store.redis.write_commands import pairs
from baton.store.seal import StoreSeal
from baton.store.store import CallStatus

ID, BALLOT = RequestId("cmpl-1"), (3, 77)


def as_stored(fields: list[str | bytes | int]) -> dict[bytes, bytes]:
    return pairs([field if isinstance(field, bytes) else str(field).encode() for field in fields])


@pytest.mark.parametrize("trust", [OPEN_CLUSTER, ClusterTrust(b"s" * 32)])
def test_a_tombstone_has_the_fields_of_its_record(trust: ClusterTrust) -> None:
    records = RecordFormat(StoreSeal("baton:", trust), UnsealedLog(), max_age_s=60.0)
    tombstone = transitions.tombstone(ID, BALLOT)
    made, expected = (
        as_stored(fields) for fields in (records.tombstone_fields(ID, BALLOT), records.call_fields(tombstone))
    )
    assert records.call(made, ID) == records.call(expected, ID) == tombstone
    assert tombstone.status is CallStatus.ENDED
    sealed = made.pop(b"sealed"), expected.pop(b"sealed")
    assert made == expected
    assert len(sealed[0]) == len(sealed[1])
