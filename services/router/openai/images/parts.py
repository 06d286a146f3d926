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
from baton.services.router.vision.remote.allowed_hosts import is_remote_url
from baton.services.router.vision.remote.fetcher import Fetched
from baton.telemetry.metrics import MEDIA_REFUSED_TOTAL

DETAILS = ("auto", "low", "high")
IMAGE_ROLES = ("user", "tool", "function")
"""Messages that may have images."""


class ForeignUrl(ValueError):
    """A URL of another kind than those that are served. The message follows the part's path."""


_Place = tuple[int, int]
"""Index of a message, and of a part in it."""


class ImageParts:
    """The images of one request, in the order of the messages."""

    def __init__(
        self, model: ImageModel, text: TextModel, *, stored: bool = False, fetched: Fetched | None = None
    ) -> None:
        """`stored`: the body comes from the state store, and has references in place of files.

        `fetched`: what the https URLs of the chat gave; None: nothing is fetched here.
        """
        self._model = model
        self._fetched = fetched
        self._stored = stored
        rules = model.rules
        self._placeholders = () if rules is None else (text.token_text(rules.placeholder), *filter(None, [model.shown]))
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
        try:
            image = self._image(url, detail, value.path_of("url"))
        except ForeignUrl as error:
            MEDIA_REFUSED_TOTAL.labels("url").inc()
            value.add_error("url", str(error))
            return
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

    def _image(self, url: str, detail: str, param: str) -> RequestImage:
        """Raises `UnreadableImage`, or `ForeignUrl` for a URL that names no file that is here."""
        reference = ImageReference.parse(url) if self._stored else None
        if reference is not None:
            return self._model.open_reference(reference, detail, param)
        if is_data_url(url):
            return self._model.open_url(url, detail, param)
        found = None if self._fetched is None else self._fetched.get(url)
        if found is None:
            wanted = "a data: URL" if self._fetched is None else "a data: or https: URL"
            nothing = ": this server fetches nothing here" if self._fetched is None else ""
            raise ForeignUrl(f"must be {wanted}, not {short_repr(url[:40])}{nothing}")
        if isinstance(found, UnreadableImage):
            raise found
        return self._model.open_file(found, detail, param)

    def check_text(self, fields: Fields, name: str, text: object) -> None:
        """Notes text that has the placeholder of an image, which would take an image's place."""
        found = [one for one in self._placeholders if one in text] if isinstance(text, str) else []
        if found:
            fields.add_error(name, f"must not have the model's placeholder for images, {found[0]}")

    def mark(self, prompt: str) -> str:
        """The text of a prompt as it is to be encoded."""
        return self._model.mark(prompt) if self._images else prompt

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


def remote_urls(body: Mapping[str, Any]) -> list[str]:
    """The https URLs of the images in a chat, as a client sent it: nothing of it has been checked."""
    messages = body.get("messages")
    found: list[str] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) and message.get("role") in IMAGE_ROLES else None
        for part in content if isinstance(content, list) else ():
            value = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
            url = value.get("url") if isinstance(value, dict) else None
            if isinstance(url, str) and is_remote_url(url):
                found.append(url)
    return found


def checked_images(model: ImageModel, text: TextModel) -> ImageModel:
    """The model, without images if its chat template does not show one: then no image would have a place."""
    if model.rules is None:
        return model
    content = [{"type": "image"}, {"type": "text", "text": "a"}]
    try:
        shown = model.mark(text.render_chat([{"role": "user", "content": content}]))
        prompt = text.encode(shown, add_special_tokens=False)
    except InvalidRequest:
        prompt = ()
    if prompt.count(model.rules.placeholder) == 1:
        return model
    return ImageModel(reason="its chat template does not show an image as one placeholder")
