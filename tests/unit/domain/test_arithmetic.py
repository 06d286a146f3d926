"""Integer arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.arithmetic import ceil_div


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**20))
def test_ceil_div_rounds_up_exactly(numerator: int, denominator: int):
    assert ceil_div(numerator, denominator) == math.ceil(Fraction(numerator, denominator))
