"""Addresses for servers that come back under the one they had."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

# Below what kernels give to outgoing connections (from 32768 on Linux): while the server is down,
# one of those could take the port, or a client that tries again and again connect to itself.
_PORTS = range(20_000, 32_000)
_ATTEMPTS = 100
# Descriptors of UDP sockets bound to the ports returned last, which tell other processes to pass
# over a port until its server has had time to listen.
_MARKS: deque[int] = deque()
_KEPT_MARKS = 32


def free_address(host: str = "127.0.0.1") -> str:
    """Returns `HOST:PORT` on which nothing listens now, and which nobody else is given soon.

    Args:
        host: Address of this machine.

    Raises:
        OSError: No free port was found.
    """
    # Not the global generator: tests that seed it would all try the same ports.
    ports = random.SystemRandom().sample(_PORTS, _ATTEMPTS)
    for port in ports:
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as mark:
            try:
                probe.bind((host, port))
                mark.bind((host, port))
            except OSError:
                continue
            _MARKS.append(mark.detach())
        if len(_MARKS) > _KEPT_MARKS:
            os.close(_MARKS.popleft())
        return f"{host}:{port}"
    raise OSError(f"none of {_ATTEMPTS} ports of {host} is free")
