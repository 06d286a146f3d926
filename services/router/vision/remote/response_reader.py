"""Reads one HTTP response to the file in it, within limits. Pure: it is fed the bytes that arrive.

Only a plain answer counts: status 200, an image's type, no coding, and a length that is told before, or chunks.
"""

from __future__ import annotations

import httptools

from baton.services.router.vision.headers.image_header import UnreadableImage

MAX_HEAD_BYTES = 32 * 1024
MAX_OVERHEAD = 4
"""Bytes that may arrive for one of the file: chunks of a byte have more beside it."""


class ResponseReader:
    """One response. `feed` until `done`, then `body`."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of the file."""
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._num_fed = 0
        self._has_head = False
        self._problem = ""
        self._body = bytearray()
        self.done = False

    @property
    def body(self) -> bytes:
        """The file."""
        return bytes(self._body)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Raises `UnreadableImage` as soon as they cannot become a file."""
        self._num_fed += len(data)
        if self._num_fed > MAX_HEAD_BYTES + MAX_OVERHEAD * self._max_bytes:
            raise UnreadableImage("came with too many bytes beside it")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self.done:
                return  # what follows the answer is not read
            raise UnreadableImage(self._problem or "came in an answer that is not HTTP/1.1") from None
        if not self._has_head and self._num_fed > MAX_HEAD_BYTES:  # behind the parser: a read may have head and file
            raise UnreadableImage("came with too many headers")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        name = name.lower()
        if name in self._headers and name in (b"content-length", b"content-type", b"content-encoding"):
            self._refuse("came with a header twice")
        self._headers[name] = value.strip().lower()

    def on_headers_complete(self) -> None:
        """Called by the parser: refuses what is no plain answer, before a byte of the file is read."""
        if self.done:
            raise ValueError("a second answer")
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._headers.clear()
            return
        if status != 200:
            redirects = "; redirects are not followed" if 300 <= status < 400 else ""
            self._refuse(f"could not be fetched: its server answered {status}{redirects}")
        get = self._headers.get
        if not get(b"content-type", b"").startswith(b"image/"):
            self._refuse("is served as another type than image/...")
        if get(b"content-encoding", b"identity") != b"identity":
            self._refuse("is served compressed")
        length = get(b"content-length")
        if length is None and get(b"transfer-encoding") != b"chunked":
            self._refuse("is served without a length")
        if length is not None and (not length.isdigit() or int(length[:20]) > self._max_bytes):
            self._refuse(f"is over {self._max_bytes} bytes")
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if len(self._body) + len(data) > self._max_bytes:
            self._refuse(f"is over {self._max_bytes} bytes")
        self._body += data

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.done = self._has_head

    def _refuse(self, problem: str) -> None:
        """Ends the parser; `feed` raises the problem."""
        self._problem = self._problem or problem
        raise ValueError(problem)
