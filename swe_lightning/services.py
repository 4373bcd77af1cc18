"""`host:port` as a user writes it in a whitelist: parsed once, refused in one sentence.

A whitelist opens single services to a box that otherwise has no network, so an entry is exact: no scheme, no wildcard,
no range, no IPv6 literal, and never an address of the link (cloud machines hand out their credentials there).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*")


@dataclass(frozen=True, order=True)
class Service:
    """One TCP service. `host` is a name or an IPv4 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def address(self) -> ipaddress.IPv4Address | None:
        """The host as an address; None if it is a name."""
        try:
            return ipaddress.IPv4Address(self.host)
        except ValueError:
            return None


def parse_service(text: str) -> Service:
    """ValueError with one sentence that says what to write instead."""
    if "://" in text or "/" in text:
        raise ValueError(f"{text!r} is a URL; write host:port, for example db.example.org:5432")
    host, colon, number = text.rpartition(":")
    if not colon or not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 65535:
        raise ValueError(f"{text!r} has no port; write host:port, for example db.example.org:5432")
    if ":" in host or host.startswith("["):
        raise ValueError(f"{text!r} is an IPv6 address; write the service's name or its IPv4 address")
    if "*" in host:
        raise ValueError(f"{text!r} is a pattern; name each service that the tests need")
    service = Service(host.lower(), int(number))
    if service.address is None and (not NAME.fullmatch(host) or host.rsplit(".", 1)[-1].isdigit()):
        raise ValueError(f"{text!r} names no host; write host:port, for example db.example.org:5432")
    if service.address is not None and not may_connect(str(service.address)):
        raise ValueError(f"{text!r} is an address no box may reach (link-local, multicast or unspecified)")
    return service


def may_connect(address: str) -> bool:
    """Whether a relay may connect to this resolved address on behalf of a box."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    return not (found.is_link_local or found.is_multicast or found.is_unspecified or str(found) == "255.255.255.255")
