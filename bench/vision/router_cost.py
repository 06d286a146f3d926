"""CPU time of the router's own work for an image: body, base64, header, identity, expansion, and the stored body.

In this process, with the router's parser. The file's way to a worker is not in it.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from baton.domain.ids import RequestId
from baton.services.router.openai.request_parser import CHAT, RawRequest, RequestParser
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import read_image_model
from bench.vision.chats import Message

MAX_MODEL_LEN = 4096


class ParsingTimer:
    """The parser of the model in `directory`."""

    def __init__(self, directory: Path) -> None:
        text = TextModel.load(directory)
        images = read_image_model(directory, text.added_token, text.encode)
        validator = RequestValidator(text, "m", MAX_MODEL_LEN, 60.0, images=images)
        self._parser = RequestParser(validator, text, "bench")

    def seconds(self, messages: list[Message]) -> float:
        """CPU time of all threads for one chat."""
        body = json.dumps({"model": "m", "messages": messages}).encode()
        raw = RawRequest(CHAT, body, RequestMetadata(RequestId("chatcmpl-1"), 0, 7))
        began_s = time.process_time()
        asyncio.run(self._parser.parse(raw))
        return time.process_time() - began_s
