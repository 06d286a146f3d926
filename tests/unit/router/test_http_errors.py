"""Errors as clients read them: a lost attempt is told in the router's own words."""

from __future__ import annotations

import pytest

from baton.domain import errors
from baton.services.router.edge.http_errors import error_response


def leaves(kind: type[errors.Interrupted]) -> list[type[errors.Interrupted]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


@pytest.mark.parametrize("kind", [kind for kind in leaves(errors.Interrupted) if kind.__module__ == errors.__name__])
def test_a_lost_attempt_has_a_message_of_its_class(kind: type[errors.Interrupted]):
    """Whatever a worker of another version says of its peer."""
    error = kind("prefill-0 at ipv4:10.0.0.7:50052: UNAVAILABLE")
    error.detail = "UNAVAILABLE: failed to connect"
    response = error_response(error)
    assert response.body.code == kind.code
    assert "again" in response.body.message
    for leak in ("prefill-0", "10.0.0.7", "UNAVAILABLE", "connect to"):
        assert leak not in response.body.message


def test_messages_of_lost_attempts_differ_by_class():
    kinds = [kind for kind in leaves(errors.Interrupted) if kind.__module__ == errors.__name__]
    assert len({error_response(kind("x")).body.message for kind in kinds}) == len(kinds)
