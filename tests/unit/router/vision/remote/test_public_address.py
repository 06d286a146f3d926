"""Which addresses are of the public internet."""

from __future__ import annotations

import pytest

from baton.services.router.vision.remote.public_address import is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::"])
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "100.127.255.255", "192.0.2.1", "198.18.0.1", "224.0.0.1", "255.255.255.255",
        "::1", "::", "fe80::1", "2606:4700::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::",
        "2001:0:4136:e378::", "5f00::1", "localhost", "", "0x7f.1", "2130706433", "127.1", "8.8.8.8 ", "08.8.8.8",
    ],
)  # fmt: skip
def test_not_public(address: str) -> None:
    assert not is_public(address)
