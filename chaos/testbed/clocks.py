"""Wall clocks of child processes that can jump: a preloaded library adds an offset that this process writes.

Monotonic clocks are not changed, as on a host whose time daemon steps the clock. `cluster` owns one instance. Linux
with a C++ compiler only; without one, clocks cannot jump and `available` is False.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_shim.cpp")
COMPILERS = ("c++", "g++", "clang++")
_OFFSET = struct.Struct("=q")


class ClockController:
    """The wall clocks of the processes of one cluster, by name. `folder` holds the library and the offsets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = compile_preloaded(SOURCE, folder)
        self._names: set[str] = set()

    @property
    def available(self) -> bool:
        """True if clocks of children can jump."""
        return self._library is not None

    def environment(self, name: str) -> Mapping[str, str]:
        """Variables for the start of a process. A restarted process keeps the offset of its host."""
        if self._library is None:
            return {}
        file = self._file(name)
        if name not in self._names:
            self._names.add(name)
            file.write_bytes(_OFFSET.pack(0))
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET_FILE": str(file)}

    def jump(self, name: str, seconds: float) -> None:
        """Sets the offset of a running process's wall clock. Raises `KeyError` for an unknown process."""
        if name not in self._names:
            raise KeyError(name)
        with self._file(name).open("r+b") as file:
            file.write(_OFFSET.pack(round(seconds * 1e9)))

    def restore(self) -> None:
        """Sets all clocks right."""
        for name in self._names:
            self.jump(name, 0.0)

    def _file(self, name: str) -> Path:
        return self._folder / f"clock-{name}"


def compile_preloaded(source: Path, folder: Path) -> Path | None:
    """Compiles a C++ file to a library for LD_PRELOAD in `folder`; None without a compiler."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    library = folder / f"{source.stem}.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library
