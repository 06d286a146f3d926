"""The suffix automaton in C++: 50 to 150 ns a token instead of 2 to 5 us, and at most 105 bytes.

`SuffixAutomaton` is its reference: both give the same matches and continuations, call by call. Without a built library
the reference is used.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from baton.engine.drafts.ngram import MAX_STEP_TOKENS
from baton.engine.drafts.suffix_automaton import SuffixAutomaton, SuffixIndex
from baton.model.kernels.build import SUFFIX_INDEX, BuildSpec, source_digest
from baton.telemetry.logs import get_logger

log = get_logger()

TOKEN_TYPE = "i"
NATIVE_STEP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SuffixLibrary:
    """The functions of `index_src/suffix_index.cpp`."""

    new: Callable[[], int | None]
    free: Callable[[int], None]
    append: Callable[[int, int, int, int], int]
    continuation: Callable[[int, int, int, int], int]
    match: Callable[[int, int, int, int], None]
    bytes: Callable[[int], int]


def open_suffix_library(spec: BuildSpec = SUFFIX_INDEX) -> SuffixLibrary | None:
    """The library of `spec`; None if it is not built from the present sources."""
    try:
        library = ctypes.CDLL(str(spec.path))
        library.baton_source_digest.restype = ctypes.c_char_p
        if library.baton_source_digest() != source_digest(spec).encode():
            return None
    except (OSError, AttributeError):
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p

    def function(name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(library, f"baton_suffix_{name}")
        found.argtypes, found.restype = arguments, result
        return found

    return SuffixLibrary(
        new=function("new", address),
        free=function("free", None, address),
        append=function("append", number, address, address, number, address),
        continuation=function("continuation", number, address, number, number, address),
        match=function("match", None, address, address, number, address),
        bytes=function("bytes", number, address),
    )


class NativeSuffixAutomaton:
    """A `SuffixIndex` in native memory, which goes with it. Raises `MemoryError` where there is none left."""

    def __init__(self, library: SuffixLibrary) -> None:
        handle = library.new()
        if handle is None:
            raise MemoryError("a suffix automaton")
        self._library, self._handle = library, handle
        self._match = array("q", [0, 0])
        self._match_address = self._match.buffer_info()[0]
        self._num_tokens = 0
        finalize(self, library.free, handle)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def match_length(self) -> int:
        """Of the longest suffix that has an earlier occurrence."""
        return self._match[0]

    @property
    def match_end(self) -> int:
        """One past the last token of that occurrence."""
        return self._match[1]

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return self._library.bytes(self._handle)

    def extend(self, tokens: Sequence[int]) -> None:
        """See `SuffixIndex.extend`."""
        buffer = array(TOKEN_TYPE, tokens)
        address, num_tokens = buffer.buffer_info()
        if self._library.append(self._handle, address, num_tokens, self._match_address):
            raise MemoryError("a suffix automaton")
        self._num_tokens += num_tokens

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """See `SuffixIndex.continuation`."""
        return self.continuation_at(self._match[1], max_tokens)

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """See `SuffixIndex.match`."""
        buffer, found = array(TOKEN_TYPE, text), array("q", [0, 0])
        self._library.match(self._handle, *buffer.buffer_info(), found.buffer_info()[0])
        return found[0], found[1]

    def continuation_at(self, first: int, max_tokens: int) -> tuple[int, ...]:
        """See `SuffixIndex.continuation_at`."""
        out = array(TOKEN_TYPE, bytes(4 * max_tokens))
        num_tokens = self._library.continuation(self._handle, first, max_tokens, out.buffer_info()[0])
        return tuple(out[:num_tokens])


@functools.cache
def _library() -> SuffixLibrary | None:
    library = open_suffix_library()
    if library is None:
        log.warning("suffix_index_not_native", hint="Drafts cost more time; `make kernels` builds the library.")
    return library


def new_suffix_index() -> SuffixIndex:
    """An empty index: the native one where it is built."""
    library = _library()
    return SuffixAutomaton() if library is None else NativeSuffixAutomaton(library)


def max_step_tokens() -> int:
    """Tokens that all rows may index in a step so that a long prompt does not delay it: half a millisecond or one."""
    return MAX_STEP_TOKENS if _library() is None else NATIVE_STEP_TOKENS
