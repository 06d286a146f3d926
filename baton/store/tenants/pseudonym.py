"""Names of tenants in the store: whoever reads Redis learns who is the same, not who it is."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from baton.domain.trust import ClusterTrust

PSEUDONYM_CHARS = 32


def pseudonyms(trust: ClusterTrust) -> Callable[[str], str]:
    """Returns the function from tenant to pseudonym: keyed by the cluster secret, a plain digest without one."""
    key = trust.key("tenant")

    def pseudonym(tenant: str) -> str:
        name = tenant.encode()
        return (hashlib.sha256(name) if key is None else hmac.new(key, name, "sha256")).hexdigest()[:PSEUDONYM_CHARS]

    return pseudonym
