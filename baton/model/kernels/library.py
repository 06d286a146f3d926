"""Finds the library of a level, proves that it is of these sources, and makes its functions callable.

Called by the kernels' Python sides. ctypes, not an extension module: the functions take addresses and numbers only, and
so one library serves every Python and its build needs no headers. ctypes lets go of the interpreter lock during a call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.model.kernels.build import Level, Recipe, digest_of, recipes

_BOOL, _INT, _ADDRESS = ctypes.c_bool, ctypes.c_int64, ctypes.c_void_p
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double


class KernelsUnavailable(Exception):
    """There is no library of a level that can be used here; the message says why, for the log."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A level's functions. Arguments are as in `src/*.cpp`: addresses, sizes in elements, strides in elements.

    `head_unit` must divide a head's size; a panel of a weight has `panel_outputs`.
    """

    level: Level
    head_unit: int
    panel_outputs: int
    norm: Callable[..., None]
    rotate_and_write: Callable[..., None]
    gate: Callable[..., None]
    multiply: Callable[..., None]
    linear_int8: Callable[..., None]
    attend: Callable[..., None]
    likeliest: Callable[..., None]
    draw: Callable[..., None]
    set_threads: Callable[..., None]


def takes(dtype: torch.dtype) -> bool:
    """Whether the kernels know this type of element."""
    return dtype in (torch.float32, torch.bfloat16)


def available_levels() -> tuple[Level, ...]:
    """Levels that are built and that this CPU can run, least first. Raises `KernelsUnavailable` if there is none."""
    portable = _recipe(Level.PORTABLE)
    num_levels = 1 + _open(portable, portable.path).baton_cpu_level()  # it numbers them in the order of `Level`
    return tuple(level for level in tuple(Level)[:num_levels] if _is_there(level))


@functools.cache
def load_kernels(level: Level) -> Kernels:
    """A level's functions. Raises `KernelsUnavailable`; a level that the CPU lacks is the caller's mistake."""
    return open_kernels(_recipe(level), _recipe(level).path)


def open_kernels(recipe: Recipe, path: Path) -> Kernels:
    """The functions of a library that was built by `recipe`. Raises `KernelsUnavailable`."""
    library = _open(recipe, path)
    for unit in (library.baton_head_unit, library.baton_panel_outputs):
        unit.restype = ctypes.c_int64
    return Kernels(
        level=recipe.level,
        head_unit=library.baton_head_unit(),
        panel_outputs=library.baton_panel_outputs(),
        norm=_function(library, "norm", _BOOL, *[_ADDRESS] * 3, _FLOAT, _INT, _INT, _ADDRESS),
        rotate_and_write=_function(library, "rotate_and_write", _BOOL, *[_ADDRESS] * 5, _INT, *[_ADDRESS] * 3),
        gate=_function(library, "gate", _BOOL, _BOOL, _ADDRESS, _INT, _INT, _ADDRESS),
        multiply=_function(library, "multiply", _BOOL, *[_ADDRESS] * 4, _INT, _INT, _INT),
        linear_int8=_function(library, "linear_int8", _BOOL, *[_ADDRESS] * 3, _INT),
        attend=_function(library, "attend", _BOOL, _ADDRESS, _ADDRESS),
        likeliest=_function(library, "likeliest", _BOOL, _ADDRESS, _INT, _INT, _ADDRESS),
        set_threads=_function(library, "set_threads", _INT),
        draw=_function(library, "draw", _ADDRESS, _INT, _FLOAT, _INT, _FLOAT, _FLOAT, _DOUBLE, _ADDRESS),
    )


def _function(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., None]:
    function = getattr(library, f"baton_{name}")
    function.argtypes, function.restype = arguments, None
    return function  # type: ignore[no-any-return]


def _is_there(level: Level) -> bool:
    try:
        load_kernels(level)
    except KernelsUnavailable:
        return False
    return True


def _recipe(level: Level) -> Recipe:
    for recipe in recipes():
        if recipe.level is level:
            return recipe
    raise KernelsUnavailable(f"no {level.value} kernels exist for this kind of machine")


def _open(recipe: Recipe, path: Path) -> ctypes.CDLL:
    name = recipe.level.value
    if not path.is_file():
        raise KernelsUnavailable(f"{name} kernels are not built (make kernels; it needs a C++ compiler)")
    try:
        library = ctypes.CDLL(str(path))
        library.baton_sources.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{name} kernels do not load: {error}") from error
    if library.baton_sources() != digest_of(recipe).encode():
        raise KernelsUnavailable(f"{name} kernels were built from other sources (make kernels)")
    return library
