"""Limits the requests and tokens of tenants a minute, over all routers. Owned by `dispatcher`.

A request reserves its prompt and `max_tokens` before it is admitted; the rest is given back when each of its sequences
ends. While the store is away, this router grants its part: the rate over the number of routers that it has seen.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from baton.domain.errors import Overloaded
from baton.domain.ids import RequestId
from baton.services.router.admission.tenants import TenantTable
from baton.services.router.generation import SequenceSpec
from baton.store.store import StoreUnavailable
from baton.store.tenants.tenant_store import RateTake, TenantStore
from baton.store.tenants.token_buckets import TokenBuckets
from baton.telemetry.metrics import ADMISSION_TOTAL

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 120.0


class RateLimited(Overloaded):
    """The tenant has used its requests or tokens of this minute."""

    code = "rate_limited"


class RateLimiter:
    """Owned by one event loop. `pseudonym`: the name of a tenant in the store."""

    def __init__(
        self,
        store: TenantStore,
        tenants: TenantTable,
        pseudonym: Callable[[str], str],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` defaults to the running loop's."""
        self.num_routers = 1  # set by `ServiceSync`, as the next
        self.store_away = False
        self._store = store
        self._tenants = tenants
        self.pseudonym = pseudonym
        self._clock = clock or asyncio.get_running_loop().time
        self._local = TokenBuckets()
        self._reserved: dict[RequestId, int] = {}
        self._refunds: defaultdict[str, int] = defaultdict(int)
        self.limits_any = any(
            limits.requests_per_minute is not None or limits.tokens_per_minute is not None
            for limits in (tenants.default, *tenants.by_name.values())
        )

    async def reserve(self, tenant: str, sequences: Sequence[SequenceSpec]) -> None:
        """Reserves one request with these sequences. Raises `RateLimited`."""
        if not self.limits_any:
            return
        amounts = {sequence.id: len(sequence.prompt_tokens) + sequence.stop.max_tokens for sequence in sequences}
        takes = self._takes(tenant, num_requests=1, num_tokens=sum(amounts.values()))
        if not takes:
            return
        wait_s = await self._take(takes)
        if wait_s > 0:
            ADMISSION_TOTAL.labels("refused", RateLimited.code, tenant).inc()
            why = f"the requests or tokens a minute of this key are used up for {wait_s:.1f} s"
            raise RateLimited(why, retry_after_s=min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s)))
        if self._tenants.limits_of(tenant).tokens_per_minute is not None:
            self._reserved.update(amounts)

    def settle(self, sequence: SequenceSpec, num_served: int) -> None:
        """Gives back what a sequence has reserved and not used. A second call for it has no effect.

        One that was begun on another router has reserved nothing here: what it used is taken.
        """
        if self._tenants.limits_of(sequence.tenant).tokens_per_minute is None:
            return
        is_takeover = sequence.attempt > 1 or bool(sequence.emitted)
        reserved = self._reserved.pop(sequence.id, 0 if is_takeover else None)
        if reserved is not None:
            self._refunds[sequence.tenant] += reserved - num_served

    def forgo(self, sequences: Iterable[SequenceSpec]) -> None:
        """Gives back everything that these sequences have reserved: they are not admitted."""
        for sequence in sequences:
            if sequence.id in self._reserved:
                self.settle(sequence, 0)

    async def flush(self) -> None:
        """Writes the refunds. Those whose answer is lost are not written again."""
        refunds, self._refunds = self._refunds, defaultdict(int)
        for tenant, amount in refunds.items():
            takes = self._takes(tenant, num_requests=0, num_tokens=-amount)
            if takes and amount:
                await self._take(takes, overdraw=True)

    def _takes(self, tenant: str, num_requests: int, num_tokens: int) -> list[RateTake]:
        limits, name = self._tenants.limits_of(tenant), self.pseudonym(tenant)
        takes: list[RateTake] = []
        if limits.requests_per_minute is not None and num_requests:
            takes.append(RateTake(f"{name}:requests", num_requests, limits.requests_per_minute))
        if limits.tokens_per_minute is not None and num_tokens:
            takes.append(RateTake(f"{name}:tokens", num_tokens, limits.tokens_per_minute))
        return takes

    async def _take(self, takes: Sequence[RateTake], *, overdraw: bool = False) -> float:
        try:
            if not self.store_away:
                return await self._store.take(takes, overdraw=overdraw)
        except StoreUnavailable:
            self.store_away = True  # the next requests do not wait for it
        part = [RateTake(take.bucket, take.amount, take.per_minute / self.num_routers) for take in takes]
        return self._local.take(part, self._clock(), overdraw=overdraw)
