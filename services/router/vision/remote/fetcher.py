"""Fetches the images of one chat: resolves each host once, checks all its addresses, and connects to one of these.

So a name that changes its address between check and connection changes nothing. No redirect is followed, no proxy of
the environment is used, and nothing is kept: the bytes go the way of those in a `data:` URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.services.router.vision.headers.image_header import UnreadableImage
from baton.services.router.vision.limits import ImageLimits
from baton.services.router.vision.remote.allowed_hosts import AllowedHosts, RemoteUrl
from baton.services.router.vision.remote.fetch_places import FetchPlaces
from baton.services.router.vision.remote.public_address import is_public
from baton.services.router.vision.remote.response_reader import ResponseReader

FETCH_TIMEOUT_S = 5.0
"""From the first look-up to the last byte, for all images of a chat together. A chat waits as long for a place."""
MAX_ADDRESSES = 4
"""Of a host that are tried, one behind the other."""
READ_BYTES = 64 * 1024
PORT = 443

Fetched = Mapping[str, bytes | UnreadableImage]
"""For each URL the file, or why there is none."""
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a host. Raises `OSError`."""
Connect = Callable[[str, int], Awaitable[socket.socket]]
"""A connected socket to an address and a port. Raises `OSError`."""


async def resolve_host(host: str) -> Sequence[str]:
    """The addresses of `host`, as the system resolves them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, PORT, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def connect_socket(address: str, port: int) -> socket.socket:
    """A connection to a numeric address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(frozen=True, slots=True)
class Network:
    """How hosts are resolved, connected to and authenticated. `tls` None: by the system's authorities."""

    resolve: Resolve = resolve_host
    connect: Connect = connect_socket
    tls: ssl.SSLContext | None = None
    timeout_s: float = FETCH_TIMEOUT_S


class _ByteBudget:
    """Bytes that the files of one chat may still have, together. What comes is counted when it comes."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise UnreadableImage("is one of those that are too large together")


@dataclass(slots=True)
class _ChatState:
    """What the images of one chat share: bytes, and the checked addresses of each host."""

    budget: _ByteBudget
    addresses: dict[str, Sequence[str]] = field(default_factory=dict)
    _hosts: dict[str, asyncio.Lock] = field(default_factory=dict)

    def host(self, name: str) -> asyncio.Lock:
        return self._hosts.setdefault(name, asyncio.Lock())


class ImageFetcher:
    """Fetches for the chats of one router."""

    def __init__(self, hosts: AllowedHosts, limits: ImageLimits, network: Network | None = None) -> None:
        self._hosts = hosts
        self._limits = limits
        self._network = network or Network()
        self._tls = self._network.tls or ssl.create_default_context()
        self._places = FetchPlaces(self._network.timeout_s)

    async def fetch_all(self, urls: Sequence[str], tenant: str = "") -> Fetched:
        """Each URL once, all at once, for a chat of `tenant`. Raises `Overloaded` while there is no place for it."""
        wanted = list(dict.fromkeys(urls))[: self._limits.max_images]
        results: dict[str, bytes | UnreadableImage] = {}
        if not wanted:
            return results  # chats that fetch nothing wait for no other chat
        async with self._places.take(tenant):
            await self._fetch_into(results, wanted)
        return results

    async def _fetch_into(self, results: dict[str, bytes | UnreadableImage], wanted: Sequence[str]) -> None:
        chat = _ChatState(_ByteBudget(self._limits.max_request_bytes))
        try:
            async with asyncio.timeout(self._network.timeout_s), asyncio.TaskGroup() as group:
                for url in wanted:
                    group.create_task(self._fetch_one(results, url, chat))
        except TimeoutError:
            late = UnreadableImage(f"could not be fetched within {self._network.timeout_s:g} s")
            results |= {url: late for url in wanted if url not in results}

    async def _fetch_one(self, results: dict[str, bytes | UnreadableImage], url: str, chat: _ChatState) -> None:
        try:
            results[url] = await self._fetch(self._hosts.split(url), chat)
        except UnreadableImage as problem:
            results[url] = problem

    async def _fetch(self, url: RemoteUrl, chat: _ChatState) -> bytes:
        async with chat.host(url.host):  # images of one host: one look-up
            if url.host not in chat.addresses:
                chat.addresses[url.host] = await self._addresses(url.host)
        try:
            sock = await self._connect(chat.addresses[url.host])
            reader, writer = await asyncio.open_connection(sock=sock, ssl=self._tls, server_hostname=url.host)
        except ssl.SSLError:
            raise UnreadableImage("could not be fetched: the certificate of its host is not valid") from None
        except OSError:
            raise UnreadableImage("could not be fetched: its host does not answer") from None
        try:
            return await self._exchange(url, reader, writer, chat.budget)
        except OSError:
            raise UnreadableImage("could not be fetched: the connection broke") from None
        finally:
            writer.transport.abort()

    async def _connect(self, addresses: Sequence[str]) -> socket.socket:
        """To the first address that answers. Raises `OSError`."""
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await self._network.connect(address, PORT)
        return await self._network.connect(addresses[-1], PORT)

    async def _addresses(self, host: str) -> Sequence[str]:
        """The addresses to connect to. Refuses a host with any address that is not public."""
        try:
            addresses = await self._network.resolve(host)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise UnreadableImage("could not be fetched: the name of its host is not known")
        if not all(is_public(address) for address in addresses):
            raise UnreadableImage("is on a host whose address is not public")
        return addresses[:MAX_ADDRESSES]

    async def _exchange(
        self, url: RemoteUrl, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: _ByteBudget
    ) -> bytes:
        lines = (f"GET {url.target} HTTP/1.1", f"Host: {url.host}", "Accept: image/*", "Accept-Encoding: identity",
                 "User-Agent: baton", "Connection: close", "", "")  # fmt: skip
        writer.write("\r\n".join(lines).encode("ascii"))
        await writer.drain()
        response = ResponseReader(self._limits.max_image_bytes)
        while not response.done:
            data = await reader.read(READ_BYTES)
            if not data:
                raise UnreadableImage("is cut: its server ended too early")
            budget.take(len(data))
            response.feed(data)
        return response.body
