"""Loads a level's library, verifies its source digest, and wraps its functions.

Called by the Python side of every kernel. Uses ctypes rather than an extension module: functions take only addresses
and numbers, so one library serves every Python and needs no headers. ctypes releases the interpreter lock during a
call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.model.kernels.build import BuildSpec, IsaLevel, build_specs, source_digest

_BOOL, _INT, _ADDRESS = ctypes.c_bool, ctypes.c_int64, ctypes.c_void_p
_FLOAT = ctypes.c_float


class KernelsUnavailable(Exception):
    """No library of a level can be used here. The message names the reason for the log."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A level's functions. Arguments are as in `src/*.cpp`: addresses, and sizes and strides in elements.

    Head sizes are multiples of `head_dim_multiple`. A panel of a weight has `panel_outputs`.
    """

    level: IsaLevel
    head_dim_multiple: int
    panel_outputs: int
    rms_norm: Callable[..., None]
    rope_and_write_kv: Callable[..., None]
    act_and_mul: Callable[..., None]
    linear: Callable[..., None]
    linear_int8: Callable[..., None]
    attend: Callable[..., None]
    run_layers: Callable[..., None]
    argmax: Callable[..., None]
    mask: Callable[..., None]
    sample: Callable[..., None]
    set_threads: Callable[..., None]
    join_lease: Callable[[int, int], None]
    leave_lease: Callable[[], None]
    borrow_core: Callable[[int, int], bool]
    borrowed_ns: Callable[[], int]
    borrow_wait_ns: Callable[[], int]


def supports_dtype(dtype: torch.dtype) -> bool:
    """True if the kernels support tensors of `dtype`."""
    return dtype in (torch.float32, torch.bfloat16)


def available_levels() -> tuple[IsaLevel, ...]:
    """Levels that are built and that this CPU can run, lowest first. Raises `KernelsUnavailable` if there is none."""
    portable = _recipe(IsaLevel.PORTABLE)
    num_levels = 1 + _open(portable, portable.path).baton_cpu_level()  # it counts levels in the order of `IsaLevel`
    return tuple(level for level in tuple(IsaLevel)[:num_levels] if _is_there(level))


@functools.cache
def load_kernels(level: IsaLevel) -> Kernels:
    """A level's functions. The CPU must support the level. Raises `KernelsUnavailable`."""
    return open_kernels(_recipe(level), _recipe(level).path)


def open_kernels(spec: BuildSpec, path: Path) -> Kernels:
    """The functions of the library at `path`, built from `spec`. Raises `KernelsUnavailable`."""
    library = _open(spec, path)
    for unit in (library.baton_head_dim_multiple, library.baton_panel_outputs):
        unit.restype = ctypes.c_int64
    return Kernels(
        level=spec.level,
        head_dim_multiple=library.baton_head_dim_multiple(),
        panel_outputs=library.baton_panel_outputs(),
        rms_norm=_function(library, "rms_norm", _BOOL, *[_ADDRESS] * 3, _FLOAT, _INT, _INT, _ADDRESS),
        rope_and_write_kv=_function(library, "rope_and_write_kv", _BOOL, *[_ADDRESS] * 5, _INT, *[_ADDRESS] * 3),
        act_and_mul=_function(library, "act_and_mul", _BOOL, _BOOL, _ADDRESS, _INT, _INT, _ADDRESS),
        linear=_function(library, "linear", _BOOL, *[_ADDRESS] * 4, _INT, _INT, _INT),
        linear_int8=_function(library, "linear_int8", _BOOL, *[_ADDRESS] * 3, _INT),
        attend=_function(library, "attend", _BOOL, _ADDRESS, _ADDRESS),
        run_layers=_function(library, "run_layers", _ADDRESS, _INT, _ADDRESS),
        argmax=_function(library, "argmax", _BOOL, _ADDRESS, _INT, _INT, _ADDRESS),
        set_threads=_function(library, "set_threads", _INT),
        join_lease=_function(library, "join_lease", _ADDRESS, _INT),
        leave_lease=_function(library, "leave_lease"),
        borrow_core=_function(library, "borrow_core", _INT, ctypes.c_uint64, result=_BOOL),
        borrowed_ns=_function(library, "borrowed_ns", result=_INT),
        borrow_wait_ns=_function(library, "borrow_wait_ns", result=_INT),
        mask=_function(library, "mask", _BOOL, _ADDRESS, _INT, _ADDRESS),
        sample=_function(library, "sample", _ADDRESS, _INT, _FLOAT, _INT, _FLOAT, _FLOAT, ctypes.c_uint64, _ADDRESS),
    )


def _function(library: ctypes.CDLL, name: str, *arguments: type, result: type | None = None) -> Callable[..., Any]:
    function = getattr(library, f"baton_{name}")
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]


def _is_there(level: IsaLevel) -> bool:
    try:
        load_kernels(level)
    except KernelsUnavailable:
        return False
    return True


def _recipe(level: IsaLevel) -> BuildSpec:
    for spec in build_specs():
        if spec.level is level:
            return spec
    raise KernelsUnavailable(f"no {level.value} kernels exist for this kind of machine")


def _open(spec: BuildSpec, path: Path) -> ctypes.CDLL:
    name = spec.level.value
    if not path.is_file():
        raise KernelsUnavailable(f"{name} kernels are not built (make kernels; it needs a C++ compiler)")
    try:
        library = ctypes.CDLL(str(path))
        library.baton_source_digest.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{name} kernels do not load: {error}") from error
    if library.baton_source_digest() != source_digest(spec).encode():
        raise KernelsUnavailable(f"{name} kernels were built from other sources (make kernels)")
    return library
