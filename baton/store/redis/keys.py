"""Key names of the state store in Redis.

    <prefix>sequence:<id>              hash    one SequenceRecord; expires after its retention
    <prefix>call:<id>                  hash    one CallRecord, and when it was opened; same retention
    <prefix>owners                     set     owners that may have open calls
    <prefix>calls:<owner>              zset    the owner's open calls -> when opened, in us on the server's clock
    <prefix>lease:<owner>              string  number of its last renewal, while the owner lives; expires after its TTL
    <prefix>generation                 string  random value of this store, drawn when it is empty; same retention
    <prefix>journal:<id>               stream  output tokens of a sequence (see write_journal.lua); same retention
    <prefix>worker:<id>                hash    incarnation, status, record (JSON); expires after its TTL
    <prefix>worker:<id>:incarnations   zset    incarnations in order of arrival, the current one last
    <prefix>workers                    zset    worker id -> expiry in ms on the server's clock
    <prefix>rate:*, <prefix>service    see `baton.store.tenants.redis_tenant_store`
    <prefix>media:*, <prefix>media-*   see `baton.store.media.redis_media_file_store`
    <prefix>routers:*, <prefix>router-views:*  see `baton.store.views.redis_view_store`
    <prefix>changes                    channel ids of workers that joined, left or changed their status

Calls, sequences and journals are sealed but for the fields that scripts need (`record_codec`, `journal_codec`).
Called by `RedisStore`, and by tests that write as a stranger.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import OwnerId, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """Key names under one prefix."""

    prefix: str

    def sequence(self, id: RequestId) -> str:
        return f"{self.prefix}sequence:{id}"

    def call(self, id: RequestId) -> str:
        return f"{self.prefix}call:{id}"

    def journal(self, id: RequestId) -> str:
        return f"{self.prefix}journal:{id}"

    def lease(self, owner: OwnerId) -> str:
        return f"{self.prefix}lease:{owner}"

    @property
    def generation(self) -> str:
        return f"{self.prefix}generation"

    def calls_of(self, owner: OwnerId) -> str:
        return f"{self.prefix}calls:{owner}"

    @property
    def owners(self) -> str:
        return f"{self.prefix}owners"

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
