"""Finds the servers behind one address: a name may stand for several."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple

from rlightning.errors import UnavailableError
from rlightning.utils.config.rpc import ClientAuthConfig
from rlightning.utils.waiting import wait_within

_NAMES_S = 2.0


class Endpoint(NamedTuple):
    """One server of those behind an address."""

    address: str
    """Where it is dialled."""
    behind: str
    """The address behind which it was found."""

    def auth(self, auth: ClientAuthConfig | None) -> ClientAuthConfig | None:
        """Returns what to show it, and to expect of it."""
        return auth_of_replica(auth, self.behind, self.address)


async def resolve(addresses: Sequence[str], *, timeout_s: float = _NAMES_S) -> list[Endpoint]:
    """Returns the servers behind some addresses: a name may have several.

    Args:
        addresses: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`, each.
        timeout_s: How long to wait for the answer of a name server.

    Raises:
        UnavailableError: A name is not known.
    """
    found = await asyncio.gather(*(find_replicas(one, timeout_s=timeout_s) for one in addresses))
    return [
        Endpoint(replica, address)
        for address, replicas in zip(addresses, found, strict=True)
        for replica in replicas
    ]


async def find_replicas(address: str, *, timeout_s: float = _NAMES_S) -> list[str]:
    """Returns the addresses of the servers that an address stands for, in ascending order.

    A name with several A records, or AAAA records if it has no others, is that of several servers:
    such is the name of a service of Docker Compose, or of a headless one of Kubernetes. All else is
    one server.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
        timeout_s: How long to wait for the answer of a name server.

    Raises:
        UnavailableError: There is no such name now, or no name server answers in time.
    """
    host, _, port = address.rpartition(":")
    # With `ipv4:A:PORT,B:PORT`, gRPC finds the one of these places where the server is.
    if address.startswith(("unix", "ipv4:")) or _is_number(host) or not host:
        return [address]
    loop = asyncio.get_running_loop()
    try:
        found = await wait_within(
            loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM), timeout_s
        )
    except (OSError, asyncio.TimeoutError) as error:
        raise UnavailableError(
            f"the name {host} is not known: {str(error) or 'no answer'}", peer=address
        ) from error
    families = {family: set[str]() for family in (socket.AF_INET, socket.AF_INET6)}
    for family, *_, where in found:
        if family in families:
            families[family].add(str(where[0]))
    four, six = families.values()
    if len(four) == 1 and len(six) == 1:  # one server, which may listen on either
        return [address]
    if four:
        return [f"{ip}:{port}" for ip in sorted(four, key=ipaddress.ip_address)]
    return [f"[{ip}]:{port}" for ip in sorted(six)]


def auth_of_replica(
    auth: ClientAuthConfig | None, address: str, replica: str
) -> ClientAuthConfig | None:
    """Returns what a client shows and expects where it dials a replica of an address.

    The certificate of a replica is expected to be for the name in the address.

    Args:
        auth: What it shows and expects there.
        address: What the replica was found behind.
        replica: Its own address.
    """
    if auth is None or auth.server_name is not None or replica == address:
        return auth
    return auth.model_copy(update={"server_name": address.rpartition(":")[0]})


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
