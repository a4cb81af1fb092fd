"""The environment of the processes that this one starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

ENVIRONMENT_PREFIX = "RLIGHTNING__"


def process_environment() -> Mapping[str, str]:
    """Returns the environment of this process, read-only by contract."""
    return os.environ  # noqa: TID251 - the one place that hands it out


_OWN: set[str] = set()
"""Variables that this process has set for itself."""


def keep_grpc_to_errors() -> None:
    """Lets gRPC's core print errors only in this process, unless `GRPC_VERBOSITY` says otherwise.

    It would print a line for every connection that a server ends for a reason, which is told as an
    error of ours already. Services that this process starts say more: nothing else tells them of
    TLS handshakes that fail. The core reads the variable when its first channel or server is made.
    """
    if "GRPC_VERBOSITY" not in process_environment():
        _OWN.add("GRPC_VERBOSITY")
        os.environ["GRPC_VERBOSITY"] = "ERROR"  # noqa: TID251 - as above


class Launch(NamedTuple):
    """How torchrun has started this process.

    Attributes:
        rank: Its number among the learners.
        world_size: How many there are.
        local_rank: Its number among those of this machine.
    """

    rank: int
    world_size: int
    local_rank: int


def launch() -> Launch | None:
    """Returns how torchrun has started this process; None if it did not."""
    environ = process_environment()
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    rank, world_size, local = (int(environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Launch(rank, world_size, local)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a child that reads an effective config.

    Variables that override config values are left out: the effective config has them already, and
    they would undo what was decided since, such as the addresses that were bound. So are those that
    this process has set for itself.
    """
    inherited = process_environment().items()
    kept = {k: v for k, v in inherited if not k.startswith(ENVIRONMENT_PREFIX) and k not in _OWN}
    return kept | dict(extra)
