"""What all tests share: how Hypothesis looks for examples.

`make test` draws the same examples every time, so that a run that was green stays green; `HYPOTHESIS_PROFILE=explore`
looks for new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
