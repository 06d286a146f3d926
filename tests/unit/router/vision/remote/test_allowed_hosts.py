"""Which URLs may be fetched: https to a listed host, however the URL is written."""

from __future__ import annotations

import pytest

from baton.services.router.vision.headers.image_header import UnreadableImage
from baton.services.router.vision.remote.allowed_hosts import MAX_URL_CHARS, AllowedHosts, RemoteUrl

HOSTS = AllowedHosts(("a.example", "xn--bcher-kva.example", "Upper.Example"))


@pytest.mark.parametrize(
    ("url", "host", "target"),
    [
        ("https://a.example", "a.example", "/"),
        ("HTTPS://A.EXAMPLE/b?c=d#e", "a.example", "/b?c=d"),
        ("https://a.example:443/b", "a.example", "/b"),
        ("https://a.example?b=/@evil.example", "a.example", "/?b=/@evil.example"),
        ("https://xn--bcher-kva.example/%2e%2e/b", "xn--bcher-kva.example", "/%2e%2e/b"),
        ("https://upper.example//b", "upper.example", "//b"),
    ],
)
def test_allowed(url: str, host: str, target: str) -> None:
    assert HOSTS.split(url) == RemoteUrl(host, target)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/b", "ftp://a.example/b", "https:a.example/b", "//a.example/b", " https://a.example/b",
        "https://evil.example/", "https://a.example.evil.example/", "https://sub.a.example/", "https://a.example./b",
        "https://a.example:8443/", "https://a.example:443:443/", "https://a.example:/", "https://:443/",
        "https://user@a.example/", "https://user:secret@a.example/", "https://a.example@evil.example/",
        "https://a.example\\@evil.example/", "https://evil.example\\.a.example/", "https://a.example%2eevil.example/",
        "https://127.0.0.1/", "https://[::1]/", "https://2130706433/", "https://0x7f.1/", "https:///a.example/",
        "https://b\u00fccher.example/", "https://\u212ca.example/", "https://a.example/\u00fc", "https://a.example/ b",
        "https://a.example/b\r\nHost: evil.example", "https://a.example\n/", "https://a\u3002example/",
        "https://\uff41.example/", "http\u017f://a.example/", "https://a.example/" + "b" * MAX_URL_CHARS, "https://",
    ],
)  # fmt: skip
def test_refused(url: str) -> None:
    with pytest.raises(UnreadableImage) as refused:
        HOSTS.split(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "host", ["*.example", "a.example:443", "127.0.0.1", "[::1]", "b\u00fccher.example", "a b", "-a.example", "a..b", ""]
)
def test_a_list_has_names_only(host: str) -> None:
    with pytest.raises(ValueError, match="is no host name"):
        AllowedHosts((host,))


def test_a_list_is_bounded() -> None:
    with pytest.raises(ValueError, match="are the most"):
        AllowedHosts(tuple(f"a{number}.example" for number in range(300)))
