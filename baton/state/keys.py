"""The names of everything the book keeps in Redis.

    <prefix>request:<id>               hash    one RequestRecord, a field each; expires after its retention
    <prefix>worker:<id>                hash    incarnation, status, record (JSON); expires after its TTL
    <prefix>worker:<id>:incarnations   zset    incarnations in order of arrival; the last one reigns
    <prefix>workers                    zset    worker id -> expiry in ms on the server's clock
    <prefix>changes                    channel a worker joined, left or changed its status; carries its id

`RedisBook` is the only caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix."""

    prefix: str

    def request(self, id: RequestId) -> str:
        return f"{self.prefix}request:{id}"

    def worker(self, id: WorkerId) -> str:
        return f"{self.prefix}worker:{id}"

    def incarnations(self, id: WorkerId) -> str:
        return f"{self.prefix}worker:{id}:incarnations"

    @property
    def workers(self) -> str:
        return f"{self.prefix}workers"

    @property
    def changes(self) -> str:
        return f"{self.prefix}changes"
