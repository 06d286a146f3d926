"""Compiles native code into `built/`: the kernels, one library for each instruction set level, and the suffix index.

Called by the build hook (`hatch_build.py`) and by `scripts/build_kernels.py`. Imports the standard library only,
because it runs before anything is installed. Levels are separate libraries, so that no inline function compiled for one
level can be linked into another.
"""

from __future__ import annotations

import enum
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "src"
INDEX_SOURCE_DIR = Path(__file__).parent / "index_src"
BUILT_DIR = Path(__file__).parent / "built"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # NaN and infinity stay exact
)
TIMEOUT_S = 900.0
"""Of one library. It takes half a minute alone, and many times that on a loaded machine."""


class IsaLevel(enum.Enum):
    """Instruction sets that a library needs, lowest first."""

    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX512_BF16 = "avx512_bf16"


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """Compiler flags of a level. `vector_bytes`: size of the vectors in the sources."""

    level: IsaLevel
    vector_bytes: int
    flags: tuple[str, ...]
    sources: Path = SOURCE_DIR

    @property
    def name(self) -> str:
        """The library's, for messages."""
        return f"{self.level.value} kernels" if self.sources == SOURCE_DIR else "suffix index"

    @property
    def path(self) -> Path:
        """The library's path."""
        stem = self.level.value if self.sources == SOURCE_DIR else "suffix_index"
        return BUILT_DIR / f"{stem}.so"


SUFFIX_INDEX = BuildSpec(IsaLevel.PORTABLE, 16, (), INDEX_SOURCE_DIR)
"""Holds no vector code: one library serves every machine, also one whose model is on a GPU."""
_PORTABLE = BuildSpec(IsaLevel.PORTABLE, 16, ())
_AVX512_FEATURES = ("f", "bw", "vl", "dq", "vnni", "bf16")
_AVX512_DOT = ("-DBATON_BF16_DOT", "-DBATON_INT8_DOT")
_X86 = (
    BuildSpec(IsaLevel.AVX2, 32, ("-mavx2", "-mfma")),
    BuildSpec(IsaLevel.AVX512_BF16, 64, (*(f"-mavx512{part}" for part in _AVX512_FEATURES), *_AVX512_DOT)),
)


class BuildFailed(Exception):
    """A library could not be built. The message names the reason for the person who installs."""


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The result for one level. `is_new`: it was compiled now; `failure`: why it is missing."""

    spec: BuildSpec
    is_new: bool
    failure: str | None


def build_specs() -> tuple[BuildSpec, ...]:
    """The kernels' levels of this kind of machine."""
    return (_PORTABLE, *_X86) if platform.machine() in ("x86_64", "AMD64") else (_PORTABLE,)


def source_digest(spec: BuildSpec) -> str:
    """Digest of everything that the library is built from. The library embeds it."""
    digest = hashlib.sha256()
    for path in sorted(spec.sources.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(" ".join((*FLAGS, *spec.flags, str(spec.vector_bytes))).encode())
    return digest.hexdigest()[:32]


def is_current(spec: BuildSpec) -> bool:
    """True if the library exists and was built from the current sources."""
    return spec.path.is_file() and source_digest(spec).encode() in spec.path.read_bytes()


def build_all(compiler: str | None = None) -> Iterator[BuildResult]:
    """Builds every outdated library in parallel. A failure of one level leaves the others."""
    with ThreadPoolExecutor() as workers:
        yield from workers.map(lambda spec: _build_unless_current(spec, compiler), (*build_specs(), SUFFIX_INDEX))


def _build_unless_current(spec: BuildSpec, compiler: str | None) -> BuildResult:
    if is_current(spec):
        return BuildResult(spec, is_new=False, failure=None)
    try:
        build(spec, spec.path, compiler)
    except BuildFailed as error:
        return BuildResult(spec, is_new=False, failure=str(error))
    return BuildResult(spec, is_new=True, failure=None)


def build(spec: BuildSpec, target: Path, compiler: str | None = None) -> None:
    """Compiles one library. A running process keeps the one it has loaded. Raises `BuildFailed`."""
    try:
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built_path = Path(scratch) / target.name
            _compile([compiler or _find_compiler(), *_arguments(spec), "-o", str(built_path)])
            os.replace(built_path, target)
    except OSError as error:
        raise BuildFailed(f"cannot write {target}: {error}") from error


def _arguments(spec: BuildSpec) -> list[str]:
    sources = [path for path in sorted(spec.sources.glob("*.cpp")) if spec is _PORTABLE or path.name != "cpu_level.cpp"]
    defined = (f"-DBATON_VECTOR_BYTES={spec.vector_bytes}", f'-DBATON_SOURCE_DIGEST="{source_digest(spec)}"')
    return [*FLAGS, *spec.flags, *defined, *map(str, sources)]


def _find_compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildFailed(f"no C++ compiler was found ({', '.join(COMPILERS)}; Debian: apt install g++)")


def _compile(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise BuildFailed(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} took longer than {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise BuildFailed(f"{command[0]} failed: {done.stderr.strip()[:1000]}")
