"""Position of a reader in a journal: the tokens that it has read, and the attempt that wrote the last one. Pure.

A store that was emptied or rolled back may get another journal of the same sequence, which a later attempt began anew,
perhaps with another model. A reader that went on at its old index would mix two answers. So a part that another attempt
wrote is compared from token 0 on. Owned by `JournalReader`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

from baton.domain.errors import ModelReplaced
from baton.domain.ids import AttemptId
from baton.domain.request import OutputToken
from baton.services.router.streaming.choice_reader import ANSWER_REPLACED
from baton.store.store import JournalPart


class JournalPosition:
    """Starts at token 0."""

    def __init__(self) -> None:
        self.num_read = 0
        self._digest = 0
        self._writer: AttemptId | None = None

    def continues(self, part: JournalPart) -> bool:
        """True if the attempt that wrote the last token read wrote the first one of `part`, too."""
        return not self.num_read or not part.writers or part.writers[0] == self._writer

    def advance(self, part: JournalPart) -> None:
        """Adds the tokens of `part`, which begins here."""
        self.num_read += len(part.tokens)
        self._digest = _digest(part.tokens, self._digest)
        if part.writers:
            self._writer = part.writers[-1]

    def rest_of(self, whole: JournalPart) -> JournalPart:
        """The part of a journal behind this position; empty if the journal does not reach it yet.

        Raises `ModelReplaced` if the journal begins with other tokens than those that were read, or ends before them.
        """
        known = whole.tokens[: self.num_read]
        if len(known) < self.num_read:
            if whole.ended:
                raise ModelReplaced(ANSWER_REPLACED)
            return JournalPart((), 0, None, "")
        if _digest(known) != self._digest:
            raise ModelReplaced(ANSWER_REPLACED)
        return replace(whole, tokens=whole.tokens[self.num_read :])


def _digest(tokens: Sequence[OutputToken], before: int = 0) -> int:
    return zlib.crc32(b"".join(token.token.to_bytes(4, "little") for token in tokens), before)
