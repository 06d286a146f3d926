"""A quick constructor makes the same objects."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace

import msgspec
import pytest

from baton.domain.values.quick_init import quick_init


@dataclass(frozen=True, slots=True)
class Plain:
    """A value."""

    first: int
    second: str
    third: tuple[int, ...] = ()
    hidden: int = field(default=7, compare=False, repr=False)

    @property
    def total(self) -> int:
        return self.first + len(self.third)


@quick_init
@dataclass(frozen=True, slots=True)
class Quick:
    """A value."""

    first: int
    second: str
    third: tuple[int, ...] = ()
    hidden: int = field(default=7, compare=False, repr=False)

    @property
    def total(self) -> int:
        return self.first + len(self.third)


MAKES = [((1, "a"), {}), ((1, "a", (2, 3)), {}), ((1,), {"second": "b", "hidden": 9}), ((), {"second": "", "first": 0})]


@pytest.mark.parametrize(("args", "named"), MAKES)
def test_it_makes_what_the_plain_one_makes(args, named) -> None:
    plain, quick = Plain(*args, **named), Quick(*args, **named)
    assert type(quick) is Quick
    assert asdict(quick) == asdict(plain)
    assert repr(quick) == repr(plain).replace("Plain", "Quick")
    assert hash(quick) == hash(plain)
    assert quick.total == plain.total
    assert quick == Quick(*args, **named)
    assert quick != replace(quick, first=quick.first + 1)


@pytest.mark.parametrize("args", [(), (1,), (1, "a", (), 7, 8)])
def test_it_refuses_what_the_plain_one_refuses(args) -> None:
    for cls in (Plain, Quick):
        with pytest.raises(TypeError, match="argument"):
            cls(*args)


def test_what_it_makes_is_frozen() -> None:
    quick = Quick(1, "a")
    with pytest.raises(FrozenInstanceError):
        quick.first = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del quick.first
    assert not hasattr(quick, "__dict__")


def test_copies_and_codecs_bring_it_back() -> None:
    quick = Quick(1, "a", (2,), 9)
    for again in (pickle.loads(pickle.dumps(quick)), copy.copy(quick), copy.deepcopy(quick), replace(quick)):
        assert type(again) is Quick
        assert asdict(again) == asdict(quick)
    assert msgspec.json.decode(msgspec.json.encode(quick), type=Quick) == quick


def test_it_tells_its_parameters_and_fields() -> None:
    assert str(inspect.signature(Quick)) == str(inspect.signature(Plain))
    assert [each.name for each in fields(Quick)] == [each.name for each in fields(Plain)]


def test_it_has_no_subclasses() -> None:
    with pytest.raises(TypeError, match="derived"):
        type("Derived", (Quick,), {})


def unslotted() -> type:
    return dataclass(frozen=True)(type("Bad", (), {"__annotations__": {"a": int}}))


def with_factory() -> type:
    names = {"__annotations__": {"a": list}, "a": field(default_factory=list)}
    return dataclass(frozen=True, slots=True)(type("Bad", (), names))


def with_post_init() -> type:
    names = {"__annotations__": {"a": int}, "__post_init__": lambda self: None}
    return dataclass(frozen=True, slots=True)(type("Bad", (), names))


@pytest.mark.parametrize("make", [unslotted, with_factory, with_post_init])
def test_a_constructor_that_does_more_is_refused(make) -> None:
    with pytest.raises(TypeError, match="Bad"):
        quick_init(make())
