"""The environment of the processes that this one starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

ENVIRONMENT_PREFIX = "RLIGHTNING__"


def process_environment() -> Mapping[str, str]:
    """Returns the environment of this process, read-only by contract."""
    return os.environ  # noqa: TID251 - the one place that hands it out


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a child that reads an effective config.

    Variables that override config values are left out: the effective config has them already, and
    they would undo what was decided since, such as the addresses that were bound.
    """
    inherited = process_environment().items()
    return {k: v for k, v in inherited if not k.startswith(ENVIRONMENT_PREFIX)} | dict(extra)
