"""Addresses for servers that come back under the one they had."""

from __future__ import annotations

import random
import socket

# Below what kernels give to outgoing connections (from 32768 on Linux): while the server is down,
# one of those could take the port, or a client that tries again and again connect to itself.
_PORTS = range(20_000, 32_000)
_ATTEMPTS = 100


def free_address(host: str = "127.0.0.1") -> str:
    """Returns `HOST:PORT` on which nothing listens now, and which stays free while nobody asks.

    Args:
        host: Address of this machine.

    Raises:
        OSError: No free port was found.
    """
    # Not the global generator: tests that seed it would all try the same ports.
    ports = random.SystemRandom().sample(_PORTS, _ATTEMPTS)
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return f"{host}:{port}"
    raise OSError(f"none of {_ATTEMPTS} ports of {host} is free")
