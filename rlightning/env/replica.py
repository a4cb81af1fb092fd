"""What tells an env server from others of the same config."""

from __future__ import annotations

import hashlib
import re
import socket

import numpy as np

AUTO = "auto"
"""Stands for the name of the machine, which in a container is the container's own."""


def replica_name(configured: str | None) -> str | None:
    """Returns the name of this env server among several: a part of ids, `[A-Za-z0-9._-]{1,63}`.

    Args:
        configured: `services.env.replica`: a name, `auto`, or None for the only one.
    """
    if configured != AUTO:
        return configured
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:63] or "env"


def replica_seed(seed: int, replica: str) -> int:
    """Returns a seed of one of several env servers, so that they do not play the same episodes.

    Args:
        seed: What they have in common.
        replica: Name of this one.

    Returns:
        At least 0 and below 2**31, which is what simulators take; the same for the same two.
    """
    digest = hashlib.sha256(replica.encode()).digest()
    words = np.frombuffer(digest, "<u4").tolist()
    return int(np.random.SeedSequence([seed, *words]).generate_state(1)[0]) >> 1
