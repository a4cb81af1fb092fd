"""Tells why nobody can listen on an address, where gRPC only says that it could not."""

from __future__ import annotations

import asyncio
import os
import socket

from rlightning.errors import ConfigError
from rlightning.utils.config.rpc import check_address


async def check_bindable(address: str) -> None:
    """Checks that an address can be listened on now.

    gRPC would log the reason on stderr in a form of its own, and takes the lowest 16 bits of a port
    that is too high.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.

    Raises:
        ConfigError: It is none of these, its port is taken, or it is not one of this machine.
    """
    try:
        check_address(address)
    except ValueError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from None
    if address.startswith(("unix:", "unix-abstract:")):
        return
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
    errors = [_bind_error(family, name) for family, _, _, _, name in found]
    if None not in errors:
        raise ConfigError(f"cannot listen on {address}: {errors[0]}")


def _bind_error(family: int, name: tuple[object, ...]) -> str | None:
    """Returns why a socket cannot be bound; None if it can."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: what an earlier server left behind is no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(name)
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    return None
