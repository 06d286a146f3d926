"""Connections that pack their commands with hiredis. Used by `client`; knows no record.

redis-py reads with hiredis, but its asyncio connections pack in Python, argument by argument: a third of the CPU time
of a command.
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
    """New connections of `pool` pack with hiredis."""
    pool.connection_class = _PACKING_CONNECTIONS[pool.connection_class]


def _pack(args: tuple[Any, ...]) -> list[bytes]:
    """Packs a command; empty for a command name of two words, which is sent as two arguments."""
    name = args[0]
    return [] if not isinstance(name, str) or " " in name else [pack_command(args)]
