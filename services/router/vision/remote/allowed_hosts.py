"""Which URLs a router may fetch: https, to exactly the hosts that the operator has listed. Pure.

A URL is split here and nowhere else, so that no other reading of it can reach another host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.services.router.vision.headers.image_header import UnreadableImage

SCHEME = "https://"
MAX_URL_CHARS = 4096
MAX_HOSTS = 256
_HOST = re.compile(r"(?=.{1,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""A host name in lower case. Its last label begins with a letter, so no IP address is one in any notation."""
_URL = re.compile(r"https://(?P<authority>[^/?#]*)(?P<target>[!-~]*)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """`host` in lower case, and `target`: path and query, as they go into the request line. The port is 443."""

    host: str
    target: str


class AllowedHosts:
    """The hosts of one router. Names are compared whole: no wildcards, no subdomains."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        """Raises `ValueError` for what is no host name: an address, a port, a wildcard, letters beyond ASCII."""
        if len(hosts) > MAX_HOSTS:
            raise ValueError(f"{len(hosts)} hosts are listed; {MAX_HOSTS} are the most")
        for host in hosts:
            if not _HOST.fullmatch(host.lower()):
                raise ValueError(f"{host!r} is no host name; write one as in images.example, or its xn-- form")
        self._hosts = frozenset(host.lower() for host in hosts)

    def split(self, url: str) -> RemoteUrl:
        """Raises `UnreadableImage`, to follow "the image", for every URL that may not be fetched."""
        if len(url) > MAX_URL_CHARS:
            raise UnreadableImage(f"has a URL of over {MAX_URL_CHARS} characters")
        found = _URL.fullmatch(url)
        if found is None:
            raise UnreadableImage("has a URL that is not https, or has characters that must be escaped")
        authority, target = found["authority"].lower().removesuffix(":443"), found["target"].partition("#")[0]
        if "@" in authority:
            raise UnreadableImage("has a URL with a user name")
        if not found["authority"].isascii() or authority not in self._hosts:
            raise UnreadableImage("is not on a host that this server may fetch from")
        return RemoteUrl(authority, target if target.startswith("/") else f"/{target}")


def is_remote_url(url: str) -> bool:
    """True for what could be fetched from some host."""
    return url[: len(SCHEME)].lower() == SCHEME
