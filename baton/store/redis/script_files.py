"""Sources of the Lua scripts. Called by `RedisClient` and by the simulation's server."""

from __future__ import annotations

import functools
import importlib.resources
import re

_INCLUDE = re.compile(r"^--@(\w+)$", re.MULTILINE)
_PASTE = re.compile(r"^--\+(\w+)$", re.MULTILINE)


@functools.cache
def script_source(name: str) -> str:
    """Returns the source of a script. A line `--@NAME` becomes the function `scripts.NAME`, which runs that script.

    A line `--+NAME` becomes the text of that file. Raises `FileNotFoundError`.
    """
    folder = importlib.resources.files("baton.store.redis")
    source = folder.joinpath("scripts", f"{name}.lua").read_text(encoding="utf-8")
    source = _PASTE.sub(lambda found: script_source(found[1]), source)
    return _INCLUDE.sub(lambda found: _function(found[1]), source)


def _function(name: str) -> str:
    return f"function scripts.{name}(KEYS, ARGV)\n{script_source(name)}\nend"
