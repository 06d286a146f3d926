"""Shows answers: styled and with times on a terminal, plain text into a pipe.

Answers go to standard output, everything else to standard error, so that a pipe gets the answer only.
"""

from __future__ import annotations

import readline
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from baton.services.cli.chat.answer import AnswerPart, PartKind

_DIM, _ACCENT, _BAD, _RESET = "\033[2m", "\033[36m", "\033[31m", "\033[0m"
_STYLES = {PartKind.TEXT: "", PartKind.REASONING: _DIM, PartKind.TOOL_CALL: _ACCENT}
_TITLES = {PartKind.REASONING: "thinking: ", PartKind.TOOL_CALL: "call: "}
PROMPT = "> "


@dataclass(slots=True)
class ChatOutput:
    """`styled`: standard output is a terminal that takes colours. `notes`: show times and hints."""

    styled: bool
    notes: bool
    out: TextIO
    err: TextIO
    _kind: PartKind | None = None

    def piece(self, piece: AnswerPart) -> None:
        """Shows a piece at once. Control characters of a model do not reach the terminal."""
        if piece.kind is not PartKind.TEXT and not self.notes:
            return  # a pipe gets the answer's text; `/save` has the calls
        if piece.kind is not self._kind:
            separator = "\n" if self._kind is not None else ""
            self._write(f"{separator}{self._style(_STYLES[piece.kind], _TITLES.get(piece.kind, ''))}")
            self._kind = piece.kind
        self._write(self._style(_STYLES[piece.kind], printable(piece.text) if self.styled else piece.text))

    def raw(self, data: str, id: str | None) -> None:
        """Shows an event as it came."""
        self._write((f"id: {id}\n" if id else "") + f"data: {data}\n\n")

    def end(self, stats: str) -> None:
        """Ends an answer, with its times below it."""
        self._kind = None
        self._write("\n")
        if self.notes and stats:
            self.note(stats)

    def note(self, text: str) -> None:
        """A remark of the program itself."""
        if text:
            print(self._err_style(_DIM, text), file=self.err, flush=True)

    def problem(self, text: str) -> None:
        """An error."""
        print(self._err_style(_BAD, f"baton: {text}"), file=self.err, flush=True)

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def _style(self, style: str, text: str) -> str:
        return f"{style}{text}{_RESET}" if self.styled and style and text else text

    def _err_style(self, style: str, text: str) -> str:
        return f"{style}{text}{_RESET}" if self.notes and self.err.isatty() else text


def printable(text: str) -> str:
    """`text` without control characters but newline and tab: a model cannot move the cursor or set a title."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def open_terminal() -> ChatOutput:
    """The terminal of this process."""
    interactive = sys.stdout.isatty()
    return ChatOutput(interactive, interactive, sys.stdout, sys.stderr)


def read_line(interactive: bool) -> str | None:
    """The next line of standard input; None at its end. With `interactive` the line can be edited and repeated."""
    if not interactive:
        return sys.stdin.readline() or None
    try:
        return input(PROMPT)
    except EOFError:
        return None


def complete_commands(names: Sequence[str]) -> None:
    """Completes `/` commands with Tab."""

    def complete(text: str, state: int) -> str | None:
        found = [name for name in names if name.startswith(text)] if text.startswith("/") else []
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
