"""Connections that write their commands with hiredis. Used by `client`; knows no record.

redis-py reads with hiredis, but its asyncio connections write in Python, argument by argument: a third of what a
command costs the process that sends it.
"""

from __future__ import annotations

from typing import Any

from hiredis import pack_command
from redis.asyncio import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection


class _TcpConnection(Connection):
    def pack_command(self, *args: Any) -> list[bytes]:
        return _pack(args) or super().pack_command(*args)


class _TlsConnection(SSLConnection):
    def pack_command(self, *args: Any) -> list[bytes]:
        return _pack(args) or super().pack_command(*args)


class _LocalConnection(UnixDomainSocketConnection):
    def pack_command(self, *args: Any) -> list[bytes]:
        return _pack(args) or super().pack_command(*args)


_PACKING_CONNECTIONS = {
    Connection: _TcpConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _LocalConnection,
}


def use_native_packing(pool: ConnectionPool) -> None:
    """Connections that `pool` opens from now on are of this kind."""
    pool.connection_class = _PACKING_CONNECTIONS[pool.connection_class]


def _pack(args: tuple[Any, ...]) -> list[bytes]:
    """The command as it travels; empty for one whose name is of two words, which travel as two arguments."""
    name = args[0]
    return [] if not isinstance(name, str) or " " in name else [pack_command(args)]
