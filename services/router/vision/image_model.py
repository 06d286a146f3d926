"""What a router knows of a model's images: rules, processor and limits. Read once from the model's files.

`openai` asks it about the parts of messages, `app` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.domain.media.identity import LOW_DETAIL, media_identity
from baton.domain.media.span import MAX_SPANS, MediaSpan
from baton.services.router.generation import MediaFile
from baton.services.router.vision.data_url import decode_data_url
from baton.services.router.vision.expansion.config_reader import UnknownProcessor
from baton.services.router.vision.expansion.gemma import MarkedRules
from baton.services.router.vision.expansion.idefics import Encode
from baton.services.router.vision.expansion.image_tokens import ImageRules, ImageTokens
from baton.services.router.vision.expansion.reader import TokenId, read_image_rules
from baton.services.router.vision.headers.image_header import UnreadableImage
from baton.services.router.vision.headers.reader import read_header
from baton.services.router.vision.limits import ImageLimits
from baton.services.router.vision.reference import ImageReference
from baton.settings.processor_digest import processor_digest


class MisplacedImage(ValueError):
    """The prompt has other placeholders than those of its images. The message follows "messages:"."""


@dataclass(frozen=True, slots=True)
class RequestImage:
    """One image of a request: its file, its tokens, and what a stored call has in its place."""

    file: MediaFile
    tokens: ImageTokens
    reference: ImageReference


@dataclass(frozen=True, slots=True)
class ImageModel:
    """`rules` None: the model has no images, or for `reason` none that are served. `processor`: digest of its files."""

    rules: ImageRules | None = None
    processor: str = ""
    limits: ImageLimits = field(default_factory=ImageLimits)
    reason: str = ""

    @property
    def shown(self) -> str:
        """What the chat template writes for an image, if that is another token than the placeholder; else ""."""
        return self.rules.shown if isinstance(self.rules, MarkedRules) else ""

    def mark(self, prompt: str) -> str:
        """The text of a prompt as it is to be encoded: some families have text around an image."""
        return self.rules.mark(prompt) if isinstance(self.rules, MarkedRules) else prompt

    def open_url(self, url: str, detail: str, param: str) -> RequestImage:
        """The image in a `data:` URL. `param`: the path of its part. Raises `UnreadableImage`."""
        return self.open_file(decode_data_url(url, self.limits.max_image_bytes), detail, param)

    def open_file(self, data: bytes, detail: str, param: str) -> RequestImage:
        """The image in a file. Raises `UnreadableImage`."""
        header = read_header(data)
        self.limits.check(header)
        width, height = header.shown_size
        identity = media_identity(data, self.processor, detail)
        return self._image(ImageReference(identity, self.processor, width, height, len(data)), data, detail, param)

    def open_reference(self, reference: ImageReference, detail: str, param: str) -> RequestImage:
        """The image that a stored call refers to, without its file. Raises `UnreadableImage`."""
        if reference.processor != self.processor:
            raise UnreadableImage("was counted for another image processor")
        return self._image(reference, None, detail, param)

    def _image(self, reference: ImageReference, data: bytes | None, detail: str, param: str) -> RequestImage:
        if self.rules is None:
            raise UnreadableImage("is not served by this model")
        tokens = self.rules.expand(reference.width, reference.height, low_detail=detail == LOW_DETAIL)
        file = MediaFile(
            reference.identity, data, reference.num_bytes, self.processor, detail, tokens.num_rows, tokens.grid, param
        )
        return RequestImage(file, tokens, reference)

    def place(self, prompt: Sequence[int], images: Sequence[RequestImage]) -> tuple[tuple[int, ...], list[MediaSpan]]:
        """The prompt with the tokens of its images in place of one placeholder each, and the spans.

        Raises `MisplacedImage` for another number of placeholders: a client wrote some as text, or the chat template
        left images out.
        """
        if self.rules is None:
            return tuple(prompt), []
        placeholder, found = self.rules.placeholder, prompt.count(self.rules.placeholder)
        if found > len(images):
            raise MisplacedImage("have the placeholder of an image as text")
        if found < len(images):
            raise MisplacedImage("have images where the chat template takes none")
        tokens: list[int] = []
        spans: list[MediaSpan] = []
        start = 0
        for image in images:
            at = prompt.index(placeholder, start)
            tokens += prompt[start:at]
            spans += image.tokens.spans(len(tokens), image.file.identity)
            tokens += image.tokens.ids
            start = at + 1
        if len(spans) > MAX_SPANS:
            raise MisplacedImage(f"have images of {len(spans)} spans; {MAX_SPANS} are the most")
        return (*tokens, *prompt[start:]), spans


def read_image_model(directory: Path, token_id: TokenId, encode: Encode) -> ImageModel:
    """What the files in `directory` say about images. Raises `OSError` and `ValueError` for unreadable ones."""
    try:
        rules = read_image_rules(directory, token_id, encode)
    except UnknownProcessor as error:
        return ImageModel(reason=str(error))
    return ImageModel() if rules is None else ImageModel(rules, processor_digest(directory))
