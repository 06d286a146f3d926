"""The commands of Redis that the state store uses, in this process, with its Lua scripts in Lua 5.1.

For the simulation and the contract tests. Lifetimes run on the injected clock, in seconds. Values are those of Redis: a
reply is bytes, an integer, a list or None. Knows no record.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from lupa.lua51 import LuaRuntime

Reply = Any
Snapshot = tuple[dict[bytes, Any], dict[bytes, float]]
_FUNCTION = b"return function(KEYS, ARGV)\n%s\nend"


class LuaRedis:
    """One server. Hashes, sets and sorted sets are dicts, a string is bytes, a stream a list of entries.

    `on_publish` gets the channel of every message, `on_append` the key of every stream that grows.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._data: dict[bytes, Any] = {}
        self._expires_at: dict[bytes, float] = {}
        self._num_restored = 0
        self._functions: dict[str, Any] = {}
        self._lua = LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        library = self._lua.globals()
        library[b"redis"] = self._lua.table_from({b"call": self._call, b"pcall": self._call})
        library[b"cjson"] = self._lua.table_from({b"decode": lambda text: self._to_lua(json.loads(text))})
        self.on_publish: list[Callable[[bytes], None]] = []
        self.on_append: list[Callable[[bytes], None]] = []

    def snapshot(self) -> Snapshot:
        """Returns a copy of all data, as a file of it would keep."""
        return copy.deepcopy((self._data, self._expires_at))

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces all data by an earlier copy, as a new process would. What has expired since stays expired."""
        self._data, self._expires_at = copy.deepcopy(snapshot)
        self._num_restored += 1

    def run(self, source: str, keys: list[Any], args: list[Any]) -> Reply:
        """Runs a script and returns its reply."""
        if source not in self._functions:
            self._functions[source] = self._lua.execute(_FUNCTION % source.encode())
        script = self._functions[source]
        return _from_lua(script(self._table(map(_bytes, keys)), self._table(map(_bytes, args))))

    def execute(self, name: Any, *args: Any) -> Reply:
        """Runs one command. Raises `KeyError` for one that it lacks."""
        method = _COMMANDS[_bytes(name).upper()]
        words = [_bytes(arg) for arg in args]
        if method not in _KEYLESS:
            self._expire(words[0])
        return method(self, *words)

    def _call(self, *words: Any) -> Any:
        return self._to_lua(self.execute(*words))

    def _table(self, values: Any) -> Any:
        return self._lua.table_from(list(values))

    def _to_lua(self, value: Any) -> Any:
        match value:
            case None:
                return False
            case str():
                return value.encode()
            case list():
                return self._table(map(self._to_lua, value))
            case dict():
                return self._lua.table_from({key.encode(): self._to_lua(item) for key, item in value.items()})
        return value

    def _expire(self, key: bytes) -> None:
        if self._expires_at.get(key, float("inf")) <= self._clock():
            self._delete(key)

    def _delete(self, *keys: bytes) -> int:
        for key in keys:
            self._expires_at.pop(key, None)
        return sum(self._data.pop(key, None) is not None for key in keys)

    def _exists(self, key: bytes) -> int:
        return int(key in self._data)

    def _pexpire(self, key: bytes, ttl_ms: bytes) -> int:
        if key in self._data:
            self._expires_at[key] = self._clock() + int(ttl_ms) / 1000
        return int(key in self._data)

    def _get(self, key: bytes) -> Reply:
        return self._data.get(key)

    def _set(self, key: bytes, value: bytes, *options: bytes) -> Reply:
        if b"NX" in options and key in self._data:
            return None
        self._data[key] = value
        self._expires_at.pop(key, None)
        if b"PX" in options:
            self._pexpire(key, options[options.index(b"PX") + 1])
        return b"OK"

    def _info(self, section: bytes) -> Reply:
        return b"# Server\r\nrun_id:%d\r\n" % self._num_restored

    def _time(self) -> Reply:
        seconds, microseconds = divmod(round(self._clock() * 1_000_000), 1_000_000)
        return [_bytes(seconds), _bytes(microseconds)]

    def _publish(self, channel: bytes, message: bytes) -> int:
        for listener in self.on_publish:
            listener(channel)
        return 0

    def _hset(self, key: bytes, *pairs: bytes) -> int:
        fields = self._data.setdefault(key, {})
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def _hmget(self, key: bytes, *names: bytes) -> Reply:
        fields = self._data.get(key, {})
        return [fields.get(name) for name in names]

    def _hget(self, key: bytes, name: bytes) -> Reply:
        return self._hmget(key, name)[0]

    def _hgetall(self, key: bytes) -> Reply:
        return [word for pair in self._data.get(key, {}).items() for word in pair]

    def _hdel(self, key: bytes, *names: bytes) -> int:
        return self._srem(key, *names)

    def _sadd(self, key: bytes, *members: bytes) -> int:
        return self._hset(key, *(word for member in members for word in (member, b"")))

    def _srem(self, key: bytes, *members: bytes) -> int:
        held = self._data.get(key, {})
        removed = sum(held.pop(member, None) is not None for member in members)
        if not held:
            self._delete(key)
        return removed

    def _smembers(self, key: bytes) -> Reply:
        return list(self._data.get(key, {}))

    def _zadd(self, key: bytes, score: bytes, member: bytes) -> int:
        scores = self._data.setdefault(key, {})
        is_new = member not in scores
        scores[member] = float(score)
        return int(is_new)

    def _zscore(self, key: bytes, member: bytes) -> Reply:
        score = self._data.get(key, {}).get(member)
        return None if score is None else _bytes(score)

    def _zrange(self, key: bytes, start: bytes, stop: bytes) -> Reply:
        return [member for _, member in self._ranked(key)][_slice(start, stop)]

    def _zrevrange(self, key: bytes, start: bytes, stop: bytes, _with_scores: bytes) -> Reply:
        found = self._ranked(key)[::-1][_slice(start, stop)]
        return [word for score, member in found for word in (member, _bytes(score))]

    def _zremrangebyscore(self, key: bytes, _from: bytes, to: bytes) -> int:
        return self._srem(key, *(member for score, member in self._ranked(key) if score <= float(to)))

    def _zremrangebyrank(self, key: bytes, start: bytes, stop: bytes) -> int:
        return self._srem(key, *self._zrange(key, start, stop))

    def _ranked(self, key: bytes) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in self._data.get(key, {}).items())

    def _xadd(self, key: bytes, id: bytes, *pairs: bytes) -> bytes:
        entries = self._data.setdefault(key, [])
        place = _place(id)
        if entries and place <= entries[-1][0]:
            raise ValueError(f"the id {id!r} is not above the last one")
        entries.append((place, list(pairs)))
        for listener in self.on_append:
            listener(key)
        return id

    def _xrevrange(self, key: bytes, _end: bytes, _start: bytes, _count: bytes, count: bytes) -> Reply:
        return [_entry(*entry) for entry in self._data.get(key, [])[::-1][: int(count)]]

    def _xrange_after(self, key: bytes, after: bytes) -> Reply:
        """The entries of XREAD, of one stream."""
        return [_entry(*entry) for entry in self._data.get(key, []) if entry[0] > _place(after)]


_COMMANDS: dict[bytes, Any] = {
    b"DEL": LuaRedis._delete,
    b"EXISTS": LuaRedis._exists,
    b"PEXPIRE": LuaRedis._pexpire,
    b"GET": LuaRedis._get,
    b"SET": LuaRedis._set,
    b"INFO": LuaRedis._info,
    b"TIME": LuaRedis._time,
    b"PUBLISH": LuaRedis._publish,
    b"HSET": LuaRedis._hset,
    b"HGET": LuaRedis._hget,
    b"HMGET": LuaRedis._hmget,
    b"HGETALL": LuaRedis._hgetall,
    b"HDEL": LuaRedis._hdel,
    b"SADD": LuaRedis._sadd,
    b"SREM": LuaRedis._srem,
    b"SMEMBERS": LuaRedis._smembers,
    b"ZADD": LuaRedis._zadd,
    b"ZREM": LuaRedis._srem,
    b"ZSCORE": LuaRedis._zscore,
    b"ZRANGE": LuaRedis._zrange,
    b"ZREVRANGE": LuaRedis._zrevrange,
    b"ZREMRANGEBYSCORE": LuaRedis._zremrangebyscore,
    b"ZREMRANGEBYRANK": LuaRedis._zremrangebyrank,
    b"XADD": LuaRedis._xadd,
    b"XREVRANGE": LuaRedis._xrevrange,
    b"XREAD": LuaRedis._xrange_after,
}
_KEYLESS = (LuaRedis._info, LuaRedis._time, LuaRedis._publish)


def _bytes(value: Any) -> bytes:
    """A word of a command, as Redis writes it."""
    match value:
        case bytes():
            return value
        case str():
            return value.encode()
        case float() if not value.is_integer():
            return b"%.17g" % value
    return b"%d" % int(value)


def _from_lua(value: Any) -> Reply:
    """The reply of a script: a table counts up to its first nil, a number is cut to an integer."""
    match value:
        case False | None:
            return None
        case True:
            return 1
        case float():
            return int(value)
        case int() | bytes():
            return value
    found: list[Reply] = []
    while (item := value[len(found) + 1]) is not None:
        found.append(_from_lua(item))
    return found


def _slice(start: bytes, stop: bytes) -> slice:
    last = int(stop)
    return slice(int(start), None if last == -1 else last + 1)


def _place(id: bytes) -> tuple[int, int]:
    first, _, second = id.partition(b"-")
    return int(first), int(second or 0)


def _entry(place: tuple[int, int], pairs: list[bytes]) -> Reply:
    return [b"%d-%d" % place, list(pairs)]
