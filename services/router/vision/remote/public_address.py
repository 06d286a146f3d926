"""Tells addresses of the public internet from all others. Pure.

What is not known to be public is not: private networks, this host, links, carrier NAT, metadata services, and addresses
of IPv6 that carry one of IPv4, which would reach these by another way.
"""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_UNICAST = IPv6Network("2000::/3")
"""All of IPv6 that is assigned to the public so far."""
_NOT_PUBLIC_V6 = tuple(
    IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "2620:4f:8000::/48")
)
"""Parts of it for protocols (Teredo among them), documentation, 6to4 and AS112."""
_NOT_PUBLIC_V4 = tuple(
    IPv4Network(net)
    for net in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
"""IANA's special purposes, multicast, and what is reserved."""


def is_public(text: str) -> bool:
    """True for the address of a host on the public internet. False for what is no address."""
    try:
        address = ip_address(text)
    except (ValueError, AddressValueError):
        return False
    if isinstance(address, IPv4Address):
        return not any(address in net for net in _NOT_PUBLIC_V4)
    assert isinstance(address, IPv6Address)
    if address.scope_id is not None:
        return False
    return address in _UNICAST and not any(address in net for net in _NOT_PUBLIC_V6)
