"""Named places at which a test makes a process fail; free and without effect unless one is armed.

`failpoint("storage.before_commit")` stands where a crash would be interesting. A test arms it in
its own process with `armed`, or in a child through the environment:

    RLIGHTNING_FAILPOINTS="storage.before_commit=exit@3,act.answer=sleep:0.5"

`NAME=ACTION[:ARGUMENT][@HIT]`: the action happens at the HIT-th passage, or at each without it.
Places: `actor.stepped` (the env has stepped, its outcome is not inserted yet), `insert.stored` (a
message is stored, not acked), `weights.kept` (published weights are in the state directory, not in
use) and `weights.swapped` (they are in use, not acked).
Actions: `exit` ends the process at once, as a crash would; `raise` raises `FailpointError`;
`sleep:SECONDS` blocks the thread.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlightning.errors import ConfigError, RLightningError
from rlightning.utils.config.environment import process_environment

VARIABLE = "RLIGHTNING_FAILPOINTS"
EXIT_CODE = 77
"""Exit status of a process that an `exit` failpoint ended."""

_SPEC = re.compile(
    r"(?P<name>[\w.]+)=(?P<action>exit|raise|sleep)(?::(?P<arg>[\d.]+))?(?:@(?P<hit>\d+))?"
)


class FailpointError(RLightningError):
    """What a `raise` failpoint raises."""


@dataclass
class _Failpoint:
    action: str
    seconds: float
    hit: int
    passed: int = 0


def failpoint(name: str) -> None:
    """Marks a place at which a test can make this process fail.

    Raises:
        FailpointError: A test armed this place to raise.
    """
    if _armed:
        _pass(name)


@contextmanager
def armed(specs: str) -> Iterator[None]:
    """Arms failpoints of this process for the length of a block.

    Args:
        specs: As in the environment variable.

    Raises:
        ConfigError: A spec cannot be read.
    """
    before = dict(_armed)
    _armed.update(_parse(specs))
    try:
        yield
    finally:
        _armed.clear()
        _armed.update(before)


def is_armed(name: str) -> bool:
    """Tells whether a test armed a place that needs some preparation to fail at."""
    return name in _armed


def passed(name: str) -> int:
    """Returns how often an armed failpoint was passed; 0 if it is not armed."""
    point = _armed.get(name)
    return point.passed if point is not None else 0


def _pass(name: str) -> None:
    point = _armed.get(name)
    if point is None:
        return
    point.passed += 1
    if point.hit and point.passed != point.hit:
        return
    if point.action == "exit":
        os._exit(EXIT_CODE)
    elif point.action == "sleep":
        time.sleep(point.seconds)
    else:
        raise FailpointError(f"failpoint {name}")


def _parse(specs: str) -> dict[str, _Failpoint]:
    points = {}
    for spec in filter(None, (part.strip() for part in specs.split(","))):
        match = _SPEC.fullmatch(spec)
        if match is None or (match["action"] == "sleep") != (match["arg"] is not None):
            raise ConfigError(
                f"failpoint {spec!r}: expected NAME=exit, NAME=raise or NAME=sleep:SECONDS, "
                "each with @HIT after it or not"
            )
        points[match["name"]] = _Failpoint(
            match["action"], float(match["arg"] or 0), int(match["hit"] or 0)
        )
    return points


_armed: dict[str, _Failpoint] = _parse(process_environment().get(VARIABLE, ""))
