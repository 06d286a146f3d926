"""Reads the image parts of one chat, and writes its body for the state store without the files.

`validation` makes one for each request. A part that is refused is named by its path in the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.domain.errors import InvalidRequest
from baton.domain.media.span import MediaSpan
from baton.services.router.generation import MediaFile
from baton.services.router.openai.fields import Fields, short_repr
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.data_url import is_data_url
from baton.services.router.vision.headers.image_header import UnreadableImage
from baton.services.router.vision.image_model import ImageModel, MisplacedImage, RequestImage
from baton.services.router.vision.reference import ImageReference
from baton.telemetry.metrics import MEDIA_REFUSED_TOTAL

DETAILS = ("auto", "low", "high")
IMAGE_ROLES = ("user", "tool", "function")
"""Messages that may have images."""

_Place = tuple[int, int]
"""Index of a message, and of a part in it."""


class ImageParts:
    """The images of one request, in the order of the messages."""

    def __init__(self, model: ImageModel, text: TextModel, *, stored: bool = False) -> None:
        """`stored`: the body comes from the state store, and has references in place of files."""
        self._model = model
        self._stored = stored
        rules = model.rules
        self._placeholder = None if rules is None else text.token_text(rules.placeholder)
        self._images: dict[_Place, RequestImage] = {}
        self._num_bytes = 0

    @property
    def served(self) -> bool:
        """True if the model takes images."""
        return self._model.rules is not None

    @property
    def reason(self) -> str:
        """Why a model with images is not served with them; "" for a model of text."""
        return self._model.reason

    @property
    def files(self) -> tuple[MediaFile, ...]:
        """The files, in order."""
        return tuple(image.file for image in self._images.values())

    def read(self, part: Fields, role: object, place: _Place) -> None:
        """Reads an `image_url` part of a message with this role; notes what is wrong with it."""
        limits = self._model.limits
        value = part.mapping("image_url")
        if value is None:
            if "image_url" not in part.values or part.values["image_url"] is None:
                part.add_error("image_url", 'must be an object such as {"url": "data:image/png;base64,..."}')
            return
        detail = value.values.get("detail") or "auto"
        if detail not in DETAILS:
            MEDIA_REFUSED_TOTAL.labels("detail").inc()
            value.add_mismatch("detail", f"one of {', '.join(DETAILS)}")
        elif role not in IMAGE_ROLES:
            MEDIA_REFUSED_TOTAL.labels("role").inc()
            part.add_error("type", f"must be text: only messages of {', '.join(IMAGE_ROLES)} may have images")
        elif len(self._images) >= limits.max_images:
            MEDIA_REFUSED_TOTAL.labels("number").inc()
            part.add_error("image_url", f"is over the limit: a request has at most {limits.max_images} images")
        else:
            self._open(value, str(detail), place)

    def _open(self, value: Fields, detail: str, place: _Place) -> None:
        url, limits = value.values.get("url"), self._model.limits
        if not isinstance(url, str):
            value.add_mismatch("url", "a string")
            return
        reference = ImageReference.parse(url) if self._stored else None
        if reference is None and not is_data_url(url):
            MEDIA_REFUSED_TOTAL.labels("url").inc()
            value.add_error("url", f"must be a data: URL, not {short_repr(url[:40])}: this server fetches nothing")
            return
        param = value.path_of("url")
        try:
            image = (
                self._model.open_url(url, detail, param)
                if reference is None
                else self._model.open_reference(reference, detail, param)
            )
        except UnreadableImage as error:
            MEDIA_REFUSED_TOTAL.labels("file").inc()
            value.add_error("url", f"the image {error}")
            return
        self._num_bytes += image.file.num_bytes
        if self._num_bytes > limits.max_request_bytes:
            MEDIA_REFUSED_TOTAL.labels("bytes").inc()
            value.add_error("url", f"the images of the request have over {limits.max_request_bytes} bytes together")
            return
        self._images[place] = image

    def check_text(self, fields: Fields, name: str, text: object) -> None:
        """Notes text that has the placeholder of an image, which would take an image's place."""
        if self._placeholder is not None and isinstance(text, str) and self._placeholder in text:
            fields.add_error(name, f"must not have the model's placeholder for images, {self._placeholder}")

    def place(self, prompt: tuple[int, ...], param: str) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
        """The prompt with the tokens of all images, and their spans. Raises `InvalidRequest`."""
        try:
            tokens, spans = self._model.place(prompt, tuple(self._images.values()))
        except MisplacedImage as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        return tokens, tuple(spans)

    def stored_body(self, body: Mapping[str, Any]) -> bytes | None:
        """The body of a chat with references in place of the files; None without images."""
        if not self._images:
            return None
        messages = list(body["messages"])
        for (message, part), image in self._images.items():
            content = list(messages[message]["content"])
            content[part] = {**content[part], "image_url": {**content[part]["image_url"], "url": str(image.reference)}}
            messages[message] = {**messages[message], "content": content}
        return msgspec.json.encode({**body, "messages": messages})


def checked_images(model: ImageModel, text: TextModel) -> ImageModel:
    """The model, without images if its chat template does not show one: then no image would have a place."""
    if model.rules is None:
        return model
    content = [{"type": "image"}, {"type": "text", "text": "a"}]
    try:
        prompt = text.encode(text.render_chat([{"role": "user", "content": content}]), add_special_tokens=False)
    except InvalidRequest:
        prompt = ()
    if prompt.count(model.rules.placeholder) == 1:
        return model
    return ImageModel(reason="its chat template does not show an image as one placeholder")
