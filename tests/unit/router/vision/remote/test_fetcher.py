"""Images are fetched from listed hosts over real https; every server that misbehaves costs its image, in bounds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.domain.errors import Overloaded
from baton.services.router.vision.headers.image_header import UnreadableImage
from baton.services.router.vision.limits import ImageLimits
from baton.services.router.vision.remote.allowed_hosts import AllowedHosts
from baton.services.router.vision.remote.fetch_places import MAX_FETCHING_CHATS
from baton.services.router.vision.remote.fetcher import Fetched, ImageFetcher, Network
from tests.certificates import CertificateAuthority
from tests.unit.router.vision.pictures import coloured
from tests.unit.router.vision.remote.image_server import HOST, PUBLIC, ImageServer, head, raw, whole

RED = coloured("red")
LIMITS = ImageLimits(max_image_bytes=10_000, max_request_bytes=15_000, max_images=3)
LARGE = ImageLimits(max_image_bytes=2 << 20, max_request_bytes=4 << 20, max_images=3)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ImageServer]:
    certificate = CertificateAuthority.make(tmp_path).issue("images")
    async with ImageServer(certificate, {"/red.png": whole(RED)}).running() as running:
        yield running


def fetcher(network: Network, limits: ImageLimits = LIMITS) -> ImageFetcher:
    return ImageFetcher(AllowedHosts((HOST,)), limits, network)


async def fetch(server: ImageServer, *paths: str, timeout_s: float = 60.0, limits: ImageLimits = LIMITS) -> Fetched:
    return await fetcher(server.network(timeout_s), limits).fetch_all([f"https://{HOST}{path}" for path in paths])


async def refusal(server: ImageServer, path: str, timeout_s: float = 60.0, limits: ImageLimits = LIMITS) -> str:
    (found,) = (await fetch(server, path, timeout_s=timeout_s, limits=limits)).values()
    assert isinstance(found, UnreadableImage)
    return str(found)


async def test_a_file_is_fetched_once_however_often_a_chat_shows_it(server: ImageServer) -> None:
    assert await fetch(server, "/red.png", "/red.png") == {f"https://{HOST}/red.png": RED}
    assert server.connected == [PUBLIC]
    (request,) = server.requests
    assert request.startswith(b"GET /red.png HTTP/1.1\r\nHost: localhost\r\n")
    assert b"Accept-Encoding: identity" in request


async def test_a_large_file_that_comes_with_its_head(server: ImageServer) -> None:
    """One write, far over what a head may have: a read brings both."""
    large = RED + bytes(1 << 20)
    server.answers["/large"] = whole(large)
    assert list((await fetch(server, "/large", limits=LARGE)).values()) == [large]


async def test_the_images_of_one_host_share_its_look_up(server: ImageServer) -> None:
    server.answers["/b"] = whole(RED)
    assert set((await fetch(server, "/red.png", "/b")).values()) == {RED}
    assert server.resolved == [HOST]


async def test_another_address_is_tried_when_the_first_does_not_answer(server: ImageServer) -> None:
    good, tried = server.network(), list[str]()
    server.addresses = [("8.8.8.8", PUBLIC)]

    async def connect(address: str, port: int) -> socket.socket:
        tried.append(address)
        if address != PUBLIC:
            raise OSError("no route")
        return await good.connect(address, port)

    network = Network(good.resolve, connect, good.tls)
    assert list((await fetcher(network).fetch_all([f"https://{HOST}/red.png"])).values()) == [RED]
    assert tried == ["8.8.8.8", PUBLIC]


async def test_chats_that_fetch_nothing_wait_for_nobody(server: ImageServer) -> None:
    """All places are taken by a server that hangs. One more chat with an image is told so."""
    begun, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def hang(writer: asyncio.StreamWriter) -> None:
        begun.release()
        await may_end.wait()

    server.answers["/hangs"] = hang
    slow = fetcher(server.network())
    chats = [asyncio.create_task(slow.fetch_all([f"https://{HOST}/hangs"])) for _ in range(MAX_FETCHING_CHATS)]
    for _ in chats:
        await begun.acquire()
    assert await slow.fetch_all([]) == {}
    slow._places.timeout_s = 0.02
    with pytest.raises(Overloaded, match="too many images") as told:
        await slow.fetch_all([f"https://{HOST}/red.png"])
    assert told.value.retry_after_s == 0.02
    may_end.set()
    await asyncio.gather(*chats)
    assert list((await slow.fetch_all([f"https://{HOST}/red.png"])).values()) == [RED]


async def test_chunks(server: ImageServer) -> None:
    server.answers["/a"] = raw(
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + head(None, more="Transfer-Encoding: chunked\r\n"),
        *(b"%x\r\n%s\r\n" % (len(part), part) for part in (RED[:10], RED[10:])),
        b"0\r\n\r\n",
    )
    assert list((await fetch(server, "/a")).values()) == [RED]


async def test_a_file_that_is_refused_does_not_cost_the_others(server: ImageServer) -> None:
    server.answers["/gone"] = whole(b"", status="404 Not Found")
    found = await fetch(server, "/red.png", "/gone")
    assert found[f"https://{HOST}/red.png"] == RED
    assert "answered 404" in str(found[f"https://{HOST}/gone"])


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "303 See Other", "307 T", "308 P"])
async def test_redirects_are_not_followed(server: ImageServer, status: str) -> None:
    server.answers["/a"] = whole(b"", status=status, more=f"Location: https://{HOST}/red.png\r\n")
    assert "redirects are not followed" in await refusal(server, "/a")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "addresses",
    [("127.0.0.1",), ("169.254.169.254",), ("10.0.0.1",), ("::1",), ("::ffff:8.8.8.8",), (PUBLIC, "192.168.0.1"), ()],
)
async def test_other_addresses_are_never_connected_to(server: ImageServer, addresses: tuple[str, ...]) -> None:
    server.addresses = [addresses]
    assert "host" in await refusal(server, "/red.png")
    assert server.connected == []


async def test_a_name_is_resolved_once(server: ImageServer) -> None:
    """Rebinding: the second answer of the attacker's name server is this host."""
    server.addresses = [(PUBLIC,), ("127.0.0.1",)]
    assert list((await fetch(server, "/red.png")).values()) == [RED]
    assert (server.resolved, server.connected) == ([HOST], [PUBLIC])


async def test_other_hosts_are_not_even_resolved(server: ImageServer) -> None:
    urls = ["https://evil.example/", f"https://user@{HOST}/red.png", f"http://{HOST}/red.png"]
    found = await fetcher(server.network()).fetch_all(urls)
    assert all(isinstance(found[url], UnreadableImage) for url in urls)
    assert server.resolved == []


async def test_a_certificate_of_another_authority_is_refused(server: ImageServer) -> None:
    (found,) = (await fetcher(server.network(authorities=False)).fetch_all([f"https://{HOST}/red.png"])).values()
    assert "certificate" in str(found)
    assert server.requests == []


async def test_a_certificate_of_another_name_is_refused(server: ImageServer) -> None:
    other = ImageFetcher(AllowedHosts(("images.example",)), LIMITS, server.network())
    (found,) = (await other.fetch_all(["https://images.example/red.png"])).values()
    assert "certificate" in str(found)


@pytest.mark.parametrize("sent", [RED[:-5], b""])
async def test_a_file_that_is_cut(server: ImageServer, sent: bytes) -> None:
    server.answers["/a"] = raw(head(len(RED)) + sent)
    assert "is cut" in await refusal(server, "/a")


async def test_what_follows_the_told_length_is_not_read(server: ImageServer) -> None:
    server.answers["/a"] = raw(head(len(RED)) + RED + head(4) + b"more")
    assert list((await fetch(server, "/a")).values()) == [RED]


async def test_a_length_over_the_limit_is_refused_before_the_file(server: ImageServer) -> None:
    server.answers["/a"] = raw(head(10_001))
    assert "over 10000 bytes" in await refusal(server, "/a")


async def test_an_endless_file_is_ended(server: ImageServer) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(head(None, more="Transfer-Encoding: chunked\r\n"))
        while True:
            writer.write(b"400\r\n" + bytes(1024) + b"\r\n")
            await writer.drain()

    server.answers["/a"] = endless
    message = await refusal(server, "/a")
    assert "over 10000 bytes" in message or "too large" in message


async def test_endless_headers_are_ended(server: ImageServer) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X-More: " + b"a" * 1000 + b"\r\n")
            await writer.drain()

    server.answers["/a"] = endless
    assert "too many headers" in await refusal(server, "/a", limits=LARGE)


async def test_a_slow_server_is_not_waited_for(server: ImageServer) -> None:
    """A byte now and then: each would be in time for a bound between bytes."""
    ended = asyncio.Event()

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(RED)))
        while not ended.is_set():
            writer.write(b"a")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.02)

    server.answers["/slow"] = drip
    assert "within 0.4 s" in await refusal(server, "/slow", timeout_s=0.4)
    ended.set()


async def test_compressed_files_are_refused_unread(server: ImageServer) -> None:
    bomb = gzip.compress(bytes(1 << 20))
    server.answers["/a"] = whole(bomb, more="Content-Encoding: gzip\r\n")
    assert "compressed" in await refusal(server, "/a")
    server.answers["/b"] = raw(head(None, more="Transfer-Encoding: gzip, chunked\r\n") + b"5\r\nhello\r\n0\r\n\r\n")
    assert "length" in await refusal(server, "/b")


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (whole(RED, kind="text/html"), "another type"),
        (whole(RED, kind="application/octet-stream"), "another type"),
        (whole(RED, status="206 Partial Content"), "answered 206"),
        (whole(RED, status="500 Oh"), "answered 500"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + RED), "without a length"),
        (raw(head(5, more="Content-Length: 6\r\n") + b"hello"), "HTTP"),
        (raw(head(5, more="Transfer-Encoding: chunked\r\n") + b"hello"), "HTTP"),
        (raw(head(None, more="Content-Length: -1\r\n") + b"hello"), "HTTP"),
        (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), "HTTP"),
        (raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n"), "answered 101"),
        (raw(b""), "is cut"),
    ],
)
async def test_other_answers(server: ImageServer, answer, part: str) -> None:
    server.answers["/a"] = answer
    assert part in await refusal(server, "/a")


async def test_the_files_of_a_chat_are_bounded_together(server: ImageServer) -> None:
    server.answers |= {path: whole(bytes(7_000)) for path in ("/a", "/b", "/c")}
    found = await fetch(server, "/a", "/b", "/c")
    assert sum(len(data) for data in found.values() if isinstance(data, bytes)) <= LIMITS.max_request_bytes
    assert "too large together" in " ".join(map(str, found.values()))


async def test_no_more_than_the_images_of_a_chat_are_fetched(server: ImageServer) -> None:
    server.answers |= {f"/{number}": whole(RED) for number in range(9)}
    assert len(await fetch(server, *(f"/{number}" for number in range(9)))) == LIMITS.max_images
    assert len(server.requests) == LIMITS.max_images


async def test_a_host_that_is_not_known_or_does_not_answer(server: ImageServer) -> None:
    async def unknown(host: str) -> tuple[str, ...]:
        raise OSError("no such name")

    async def unreachable(address: str, port: int) -> None:
        raise OSError("Connection refused by 10.9.8.7")

    good = server.network()
    for network, part in (
        (Network(unknown, good.connect, good.tls), "is not known"),
        (Network(good.resolve, unreachable, good.tls), "does not answer"),  # type: ignore[arg-type]
    ):
        (found,) = (await fetcher(network).fetch_all([f"https://{HOST}/red.png"])).values()
        assert part in str(found)
        assert "10.9.8.7" not in str(found)
