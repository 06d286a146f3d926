"""Makes the parser of a choice from what its request asks for. Called by `token_stream`, once a choice."""

from __future__ import annotations

from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.text.parsers import harmony
from baton.services.router.text.parsers.base import AnswerParser, OutputParser, TextParser
from baton.services.router.text.parsers.harmony import HarmonyParser
from baton.services.router.text.parsers.reasoning import ReasoningParser, ReasoningStart
from baton.services.router.text.text_model import TextModel


def answer_parser(request: ValidRequest, text: TextModel) -> AnswerParser | None:
    """A new parser; None for an answer that is text and nothing else."""
    tools, reasoning = request.tools, request.reasoning
    if tools is None and reasoning is None:
        return None
    if text.formats.is_harmony:
        in_answer = reasoning is not None and reasoning.start is ReasoningStart.CLOSED
        whole = HarmonyParser(in_answer=in_answer)
        if tools is not None:
            whole = HarmonyParser(
                tools.schemas,
                in_answer=in_answer,
                single=tools.single,
                calls_only=tools.calls_only,
                constrained=tools.constrained,
            )
        return AnswerParser(whole, {id: marker for marker, id in text.added_tokens(harmony.MARKERS).items()})
    parser: OutputParser = TextParser()
    markers: tuple[str, ...] = ()
    if tools is not None:
        parser = tools.format.parser(
            tools.schemas,
            single=tools.single,
            calls_only=tools.calls_only,
            constrained=tools.constrained,
            strict=tools.strict,
        )
        markers = tools.format.markers
    if reasoning is not None:
        format = reasoning.format
        markers += (format.opening, format.closing)
        tokens = frozenset(text.added_tokens((format.opening, format.closing)))
        parser = ReasoningParser(format, reasoning.start, parser, tokens, keep_space=reasoning.keep_space)
    return AnswerParser(parser, {id: marker for marker, id in text.added_tokens(markers).items()})
