"""The constraint on a sequence's output: phases of free text and of grammars. Values; `baton.grammar` applies them.

Part of a request. The state of a constraint is a fold over the emitted tokens, so it is never stored or sent: whoever
has the request and its tokens has the state. Markers are token ids; text that only looks like one ends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreePhase:
    """Any token, until one of the id sequences `ends` is complete (then the next phase begins), or for ever.

    `budget`: after so many tokens without an end the ids `on_budget` are the only ones allowed, one by one, and then
    the phase ends. `may_stop` False: no stop id is allowed. `banned` ids are never allowed.
    """

    ends: tuple[tuple[int, ...], ...] = ()
    budget: int | None = None
    on_budget: tuple[int, ...] = ()
    may_stop: bool = True
    banned: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if any(not end for end in self.ends):
            raise ValueError("a marker that ends a phase needs a token")
        if self.budget is not None and (self.budget < 0 or not self.on_budget):
            raise ValueError("a budget is not negative, and needs tokens to end with")


@dataclass(frozen=True, slots=True)
class GrammarPhase:
    """Tokens that the grammar allows, until it is complete and nothing may follow. `text` in llguidance's own form.

    In the last phase stop ids are allowed wherever the grammar may end.
    """

    text: str

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("a grammar needs a text")


Phase = FreePhase | GrammarPhase


@dataclass(frozen=True, slots=True)
class Constraint:
    """Phases in order. After the last one the phase of index `loop_to` begins; None: only stop ids are allowed.

    `eos`: the model's own end tokens, which end a complete grammar beside the request's stop ids. `ignore_eos`: they
    are allowed only where nothing else is; with `min_tokens` all stop ids, before so many tokens. A complete text
    ends all the same.
    """

    phases: tuple[Phase, ...]
    loop_to: int | None = None
    eos: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("a constraint needs a phase")
        if self.loop_to is not None and not 0 <= self.loop_to < len(self.phases):
            raise ValueError(f"there is no phase {self.loop_to} to loop to")

    @property
    def grammars(self) -> tuple[str, ...]:
        """The texts of its grammars, in order."""
        return tuple(phase.text for phase in self.phases if isinstance(phase, GrammarPhase))
