"""A quick `__init__` for frozen dataclasses with many fields that every request makes. Knows none of them.

The one of a frozen dataclass calls `object.__setattr__` for each field, which takes ten times as long as an assignment.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, make_dataclass
from functools import wraps
from typing import Any, TypeVar, cast

T = TypeVar("T")


def quick_init(cls: type[T]) -> type[T]:
    """Gives a class of `@dataclass(frozen=True, slots=True)` an `__init__` that assigns its fields. It is frozen still.

    While it runs, the object is of a class with the same slots and without the frozen `__setattr__`, which nobody else
    sees. Raises `TypeError` for a class whose constructor does more than to take its fields, or whose slots are not
    all its own. It must not have subclasses: their objects would become objects of `cls`.
    """
    taken: list[tuple[str, Any, Any]] = []
    for each in fields(cls):  # type: ignore[arg-type]
        if each.default_factory is not MISSING or not each.init or each.kw_only:
            raise TypeError(f"{cls.__name__}.{each.name} is more than a value with a default")
        taken.append((each.name, Any, field(default=each.default)))
    if hasattr(cls, "__post_init__") or list(cls.__dict__.get("__slots__", ())) != [name for name, *_ in taken]:
        raise TypeError(f"{cls.__name__} has a `__post_init__`, or no slots of its own for all of its fields")
    unfrozen: Any = make_dataclass(cls.__name__, taken, slots=True, eq=False, repr=False)
    target, assign, fill = cast("Any", cls), object.__setattr__, unfrozen.__init__

    @wraps(target.__init__)
    def init(self: Any, *args: Any, **named: Any) -> None:
        assign(self, "__class__", unfrozen)
        fill(self, *args, **named)
        self.__class__ = cls

    target.__init__, target.__init_subclass__ = init, classmethod(_refuse_subclass)
    return cls


def _refuse_subclass(cls: type[Any], /, **_: object) -> None:
    raise TypeError(f"{cls.__name__} cannot be derived from a class with a `quick_init`")
