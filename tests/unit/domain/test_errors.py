"""The error tree: codes are unique, survive the wire, and agree with the drawing."""

from __future__ import annotations

import re

import pytest

from baton.domain import errors
from baton.domain.errors import BatonError, Broken, Interrupted, LeaseEnded, Overloaded, Refused, WorkerLost, from_code


def tree(root: type[BatonError]) -> list[type[BatonError]]:
    """The tree as drawn; packages may define errors below it."""
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(leaf for child in children for leaf in tree(child))]


def test_codes_are_unique():
    codes = [error.code for error in tree(BatonError)]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("error", tree(BatonError))
def test_an_error_survives_by_its_code(error: type[BatonError]):
    there = from_code(error.code, "why")
    assert type(there) is error
    assert str(there) == "why"


def test_an_unknown_code_is_a_lost_worker():
    assert type(from_code("from_the_future", "why")) is WorkerLost


def test_the_drawing_names_every_leaf_with_its_code():
    drawn = dict(re.findall(r"[|`]- (\w+) +([a-z_]+)(?: |$)", errors.__doc__ or "", re.MULTILINE))
    leaves = {error for error in tree(BatonError) if tree(error) == [error]}
    assert {error.__name__: error.code for error in leaves}.items() <= drawn.items()


def test_interrupted_errors_may_be_retried_and_others_not():
    assert issubclass(LeaseEnded, Interrupted)
    assert not issubclass(Broken, Interrupted)
    assert not issubclass(Interrupted, Refused)


def test_a_refusal_carries_retry_after():
    error = Overloaded("full", param="max_tokens", retry_after_s=2.0)
    assert (str(error), error.param, error.retry_after_s) == ("full", "max_tokens", 2.0)
