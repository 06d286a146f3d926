"""A body's scalars are read from the few fields that it has; the result is that of the whole table's."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import InvalidRequest
from baton.services.router.openai.field_table.field import FieldEndpoint
from baton.services.router.openai.field_table.table import SCALARS
from baton.services.router.openai.fields import MAX_ERRORS, FieldErrors, Fields

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 3), st.floats(), st.text(max_size=3),
    st.lists(st.integers(), max_size=1), st.just({}),
)  # fmt: skip


def by_the_table(fields: Fields, endpoint: FieldEndpoint) -> dict[str, Any]:
    """Every scalar in the order of the table."""
    found = {}
    for name, scalar in SCALARS[endpoint].items():
        value = fields.values.get(name)
        if value is not None and value in scalar:
            found[name] = value
        elif value is not None:
            fields.add_mismatch(name, str(scalar))
    return found


def outcome(errors: FieldErrors) -> tuple[str, str | None]:
    try:
        errors.raise_if_any()
    except InvalidRequest as error:
        return str(error), error.param
    return "", None


@given(st.data(), st.sampled_from(FieldEndpoint))
def test_scalars_of_a_body_are_those_of_the_table(data: st.DataObject, endpoint: FieldEndpoint):
    names = st.sampled_from([*SCALARS[endpoint], "model", "messages", "unknown"])
    body = data.draw(st.dictionaries(names, VALUES, max_size=2 * MAX_ERRORS))
    expected, given = Fields(body, FieldErrors()), Fields(body, FieldErrors())
    found = given.read(SCALARS[endpoint])
    assert repr(sorted(found.items())) == repr(sorted(by_the_table(expected, endpoint).items()))
    assert outcome(given.errors) == outcome(expected.errors)


@pytest.mark.parametrize("first", ["temperature", "top_p"])
def test_the_first_wrong_field_of_the_table_is_named(first: str):
    names = [first, *({"temperature", "top_p"} - {first})]
    fields = Fields(dict.fromkeys(names, "1"), FieldErrors())
    assert fields.read(SCALARS[FieldEndpoint.CHAT]) == {}
    order = [name for name in SCALARS[FieldEndpoint.CHAT] if name in names]
    assert outcome(fields.errors)[1] == order[0]
