"""What a box reaches beside its own loopback: nothing, or exactly the services named here.

Every box has an empty network namespace. A named service appears in it as a listening socket on the loopback, whose
other end is held by the trusted side (relay.py), which connects to that one service and to nothing else. So there is no
route, no name server and no address to forge, whatever runs inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from swe_lightning.errors import UserError
from swe_lightning.services import Service

GATEWAY_PORT = 8080
GATEWAY_URL = f"http://127.0.0.1:{GATEWAY_PORT}"
"""Where a harness inside a box finds the gateway; the rest of an OpenAI base URL is the same as outside."""


@dataclass(frozen=True)
class Network:
    """`gateway`: where the gateway listens, as the trusted side sees it. `whitelist`: services of the user's."""

    gateway: Service | None = None
    whitelist: tuple[Service, ...] = ()

    def __post_init__(self) -> None:
        if self.gateway and any(_loopback(s) and s.port == GATEWAY_PORT for s in self.whitelist):
            raise ValueError(f"port {GATEWAY_PORT} of a box's loopback is the gateway's; move the whitelisted service")


@dataclass(frozen=True)
class Endpoint:
    """A listening socket in the box and the service behind it."""

    address: str
    port: int
    target: Service


def endpoints(network: Network) -> tuple[list[Endpoint], str]:
    """The sockets a box gets, and the lines of its hosts file that lead names to them.

    A name gets a loopback address of its own, an IPv4 address itself becomes an address of the box's loopback.
    """
    found, names = [], dict[str, str]()
    if network.gateway:
        found.append(Endpoint("127.0.0.1", GATEWAY_PORT, network.gateway))
    for service in dict.fromkeys(network.whitelist):
        if service.address is not None:
            address = service.host
        elif _loopback(service):
            address = "127.0.0.1"
        else:
            address = names.setdefault(service.host, f"127.0.1.{len(names) + 1}")
        found.append(Endpoint(address, service.port, service))
    return found, "".join(f"{address} {name}\n" for name, address in names.items())


def names_only(whitelist: tuple[Service, ...], kind: str) -> None:
    """A box that somebody else makes cannot be given further addresses: only names and its own loopback lead somewhere.

    UserError otherwise. `kind`: docker or kubernetes.
    """
    for service in whitelist:
        if service.address is not None and not service.address.is_loopback:
            raise UserError(
                f"sandbox.whitelist {service}: in {kind} sandboxes a service needs a name, not an address; "
                "give it one in the hosts file of this machine"
            )


def _loopback(service: Service) -> bool:
    return service.host in ("localhost", "127.0.0.1")
