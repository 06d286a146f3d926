"""Authentication of mock workers."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.ids import Incarnation
from baton.rpc.auth_interceptor import AuthInterceptor
from baton.rpc.server import ServerAuth


class MockAuth(ServerAuth):
    """Authentication of a worker that becomes another incarnation without a restart."""

    def interceptor(self) -> AuthInterceptor:
        made: AuthInterceptor
        made = self.__dict__["made"] = ServerAuth.interceptor(self)
        return made

    def change(self, incarnation: Incarnation) -> None:
        made: AuthInterceptor = self.__dict__["made"]
        made._verifier._incarnation = incarnation
        made._rules = replace(made._rules, incarnation=incarnation)
