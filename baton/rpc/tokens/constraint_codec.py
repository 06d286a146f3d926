"""Translates constraints to protobuf messages and back. Used by `codec`."""

from __future__ import annotations

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase, Phase
from baton.domain.errors import InvalidRequest
from baton.rpc.gen import common_pb2 as pb


def encode_constraint(constraint: Constraint) -> pb.Constraint:
    """To the wire."""
    return pb.Constraint(
        phases=map(_encode_phase, constraint.phases),
        loop_to=constraint.loop_to,
        eos=sorted(constraint.eos),
        ignore_eos=constraint.ignore_eos,
        min_tokens=constraint.min_tokens,
    )


def decode_constraint(message: pb.Constraint) -> Constraint:
    """From the wire. Raises `InvalidRequest` where it means nothing."""
    try:
        return Constraint(
            phases=tuple(map(_decode_phase, message.phases)),
            loop_to=message.loop_to if message.HasField("loop_to") else None,
            eos=frozenset(message.eos),
            ignore_eos=message.ignore_eos,
            min_tokens=message.min_tokens,
        )
    except ValueError as error:
        raise InvalidRequest(f"constraint: {error}", param="constraint") from None


def _encode_phase(phase: Phase) -> pb.Phase:
    if isinstance(phase, GrammarPhase):
        return pb.Phase(grammar=pb.GrammarPhase(text=phase.text))
    free = pb.FreePhase(
        ends=[pb.TokenSequence(tokens=end) for end in phase.ends],
        budget=phase.budget,
        on_budget=phase.on_budget,
        may_stop=phase.may_stop,
        banned=sorted(phase.banned),
    )
    return pb.Phase(free=free)


def _decode_phase(message: pb.Phase) -> Phase:
    """Raises `ValueError` for a kind of phase that this version does not know."""
    match message.WhichOneof("phase"):
        case "grammar":
            return GrammarPhase(message.grammar.text)
        case "free":
            free = message.free
            return FreePhase(
                ends=tuple(tuple(end.tokens) for end in free.ends),
                budget=free.budget if free.HasField("budget") else None,
                on_budget=tuple(free.on_budget),
                may_stop=free.may_stop,
                banned=frozenset(free.banned),
            )
        case _:
            raise ValueError("a phase is of no known kind")
