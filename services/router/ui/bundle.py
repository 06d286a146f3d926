"""Loads the page's files into memory and serves them. `routes` adds the routes.

`/ui/<build>/<name>`: `build` is the digest of all files, so browsers keep a file for ever and modules import each other
by relative paths. An address of another build gets the file of this one, unless kept. No file holds data of a cluster,
so none needs a key.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDERS = (Path(__file__).parent / "static", Path(__file__).parent / "vendor")
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "vary": "accept-encoding",
}
FOR_EVER = "public, max-age=31536000, immutable"
BUILD_CHARS = 12


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its bytes, the same compressed, and its type."""

    content: bytes
    compressed: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class PageBundle:
    """All files by name. `build`: digest of all of them."""

    build: str
    files: dict[str, PageFile]

    @classmethod
    def read(cls) -> PageBundle:
        """Reads the files. Raises `OSError`, and `ValueError` for two files of one name."""
        contents: dict[str, bytes] = {}
        for path in sorted(path for folder in FOLDERS for path in folder.iterdir() if path.suffix in TYPES):
            if path.name in contents:
                raise ValueError(f"two files of the page are called {path.name}")
            contents[path.name] = path.read_bytes()
        digest = hashlib.sha256(b"\0".join([part for item in contents.items() for part in (item[0].encode(), item[1])]))
        build = digest.hexdigest()[:BUILD_CHARS]
        contents[INDEX] = contents[INDEX].replace(b"{base}", b"ui/%b/" % build.encode())
        return cls(build, {name: _page_file(name, content) for name, content in contents.items()})

    def routes(self) -> list[Route]:
        """`/` and `/ui/<build>/<name>`."""
        return [Route("/", self.index), Route("/ui/{build}/{name}", self.file)]

    async def index(self, request: Request) -> Response:
        """GET /: the page."""
        return self._send(request, INDEX, "no-cache")

    async def file(self, request: Request) -> Response:
        """GET /ui/{build}/{name}: one of its files."""
        name, build = request.path_params["name"], request.path_params["build"]
        if name not in self.files or name == INDEX:
            raise HTTPException(404)
        return self._send(request, name, FOR_EVER if build == self.build else "no-cache")

    def _send(self, request: Request, name: str, caching: str) -> Response:
        file, headers = self.files[name], {**HEADERS, "cache-control": caching}
        content = file.content
        if "gzip" in request.headers.get("accept-encoding", ""):
            content, headers["content-encoding"] = file.compressed, "gzip"
        return Response(content, headers=headers, media_type=file.media_type)


@cache
def page_bundle() -> PageBundle:
    """The bundle of this installation, read once."""
    return PageBundle.read()


def _page_file(name: str, content: bytes) -> PageFile:
    return PageFile(content, gzip.compress(content, mtime=0), TYPES[Path(name).suffix])
