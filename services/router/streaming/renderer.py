"""Makes the lines of server-sent events from token events: most of them without building a response object.

`sse_stream` owns one `EventRenderer` a response. Between two events of a choice only the text changes, unless there
are log probabilities, calls, reasoning, token ids, running usage, or an end. So the renderer has the builder make one
sample chunk a choice, with a text that occurs nowhere else, and cuts it there: an event is the bytes before the text,
the text as JSON, and the bytes after it. All other events are built one by one, by the same builder.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from baton.domain.request import OutputToken
from baton.services.router.openai.response_builder import ResponseBuilder
from baton.services.router.openai.schemas import Usage
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.text.choice_text import TokenEvent

SAMPLE_TEXT = "\ue000text\ue001"
"""Private characters."""

_SAMPLE_TOKEN = OutputToken(0, 0)

ShownUsage = Usage | UnsetType | None


class EventRenderer:
    """Renders the events of one response, in order and from the first one on: the builder counts them."""

    def __init__(self, builder: ResponseBuilder, request: ValidRequest) -> None:
        options = request.stream_options
        self._builder = builder
        self._encode = msgspec.json.Encoder().encode
        self._usage: UnsetType | None = None if options is not None and options.include_usage else UNSET
        self._may_cut = not request.return_token_ids
        self._parts: dict[int, tuple[bytes, bytes]] = {}
        self._begun: set[int] = set()  # choices whose first event is rendered

    def line(self, event: TokenEvent, usage: Usage | None = None) -> bytes:
        """The line `data: ...` of an event, and the empty line. `usage`: so far, for a client that wants it in each."""
        parts = self._parts.get(event.choice)
        token = event.token
        if (
            parts is None
            or usage is not None
            or event.finish is not None
            or token is None
            or token.logprobs is not None
            or event.calls
            or event.reasoning
        ):
            return self._built(event, usage)
        return b"%b%b%b" % (parts[0], self._encode(event.text), parts[1])

    def _built(self, event: TokenEvent, usage: Usage | None) -> bytes:
        """A line from the builder. Cuts a sample at the second event of a choice.

        The first one has its role or echo, and an answer of two tokens needs no sample.
        Gives up for the whole response if the sample's text is elsewhere in it, such as in the model's name.
        """
        line = b"data: %b\n\n" % self._builder.chunk(event, self._usage if usage is None else usage)
        is_first = event.choice not in self._begun
        self._begun.add(event.choice)
        if (
            self._may_cut
            and not is_first
            and usage is None
            and event.finish is None
            and event.choice not in self._parts
        ):
            sample = self._builder.chunk(TokenEvent(event.choice, _SAMPLE_TOKEN, SAMPLE_TEXT, 0), self._usage)
            parts = sample.split(self._encode(SAMPLE_TEXT))
            self._may_cut = len(parts) == 2
            if self._may_cut:
                self._parts[event.choice] = b"data: " + parts[0], parts[1] + b"\n\n"
        return line
