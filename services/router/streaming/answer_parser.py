"""Makes the parser of a choice from what its request asks for. Called by `token_stream`, once a choice."""

from __future__ import annotations

from services.router.openai.valid_request import ValidRequest
from services.router.text.parsers.base import AnswerParser, OutputParser, TextParser
from services.router.text.parsers.hermes import HermesParser
from services.router.text.parsers.reasoning import ReasoningParser
from services.router.text.text_model import TextModel


def answer_parser(request: ValidRequest, text: TextModel) -> AnswerParser | None:
    """A new parser; None for an answer that is text and nothing else."""
    tools, reasoning = request.tools, request.reasoning
    if tools is None and reasoning is None:
        return None
    parser: OutputParser = TextParser()
    if tools is not None:
        parser = HermesParser(tools.names, single=tools.single, calls_only=tools.calls_only)
    if reasoning is None:
        return AnswerParser(parser)
    format = reasoning.format
    markers = {
        id: marker for marker in (format.opening, format.closing) if (id := text.added_token(marker)) is not None
    }
    tokens = frozenset(markers.values())
    parser = ReasoningParser(format, reasoning.start, parser, tokens, keep_space=reasoning.keep_space)
    return AnswerParser(parser, markers)
