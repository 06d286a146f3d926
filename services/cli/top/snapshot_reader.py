"""Reads snapshots of the cluster from the first router that answers. Called by `baton.services.cli.top.command`."""

from __future__ import annotations

from collections.abc import Sequence

import httpx2
import msgspec

from baton.domain.errors import BatonError
from baton.services.router.cluster.snapshot import ClusterSnapshot

TIMEOUT_S = 5.0
_MAX_SHOWN_CHARS = 200
_PATH = "/v1/cluster"


class ClusterUnreadable(BatonError):
    """No router gave a snapshot."""

    code = "cluster_unreadable"


class SnapshotReader:
    """`last_json`: the last snapshot as it came."""

    def __init__(self, routers: Sequence[str], api_key: str | None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._routers = [url.rstrip("/") for url in routers]
        self._client = httpx2.AsyncClient(timeout=TIMEOUT_S, trust_env=False, headers=headers)
        self.last_json = b""

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def read(self) -> ClusterSnapshot:
        """A snapshot. A router that does not answer goes to the end of the line. Raises `ClusterUnreadable`."""
        reasons = []
        for _ in range(len(self._routers)):
            router = self._routers[0]
            try:
                answer = await self._client.get(f"{router}{_PATH}")
            except httpx2.TransportError as error:
                reasons.append(f"{router} does not answer ({type(error).__name__})")
                self._routers.append(self._routers.pop(0))
                continue
            return self._decode(router, answer)
        raise ClusterUnreadable(f"{'; '.join(reasons)}. Give --router, such as --router http://127.0.0.1:8000")

    def _decode(self, router: str, answer: httpx2.Response) -> ClusterSnapshot:
        if answer.status_code == httpx2.codes.UNAUTHORIZED:
            raise ClusterUnreadable(f"{router} wants an API key: set BATON_API_KEY")
        if answer.status_code != httpx2.codes.OK:
            text = answer.text[:_MAX_SHOWN_CHARS]
            raise ClusterUnreadable(f"{router}{_PATH}: HTTP {answer.status_code}: {text}")
        try:
            snapshot = msgspec.json.decode(answer.content, type=ClusterSnapshot)
        except msgspec.DecodeError as error:
            raise ClusterUnreadable(f"{router} answers in another version's form: {error}") from None
        self.last_json = answer.content
        return snapshot
