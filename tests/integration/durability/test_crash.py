"""A buffer server that is killed at any moment loses nothing that it acked, and doubles nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.durability import crash as program
from tests.integration.durability.crash import (
    EVICTING,
    FAILPOINTS,
    LEAVING_FAILPOINTS,
    POWER_FAILPOINTS,
    QUEUE,
    ROLLOUTS,
    Outcome,
    crash,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VARIANTS: dict[str, dict[str, Any]] = {
    "all is kept": {},
    "the oldest are overwritten": {"capacity": EVICTING},
    "power": {"durability": "power", "failpoints": {**FAILPOINTS, **POWER_FAILPOINTS}},
    "a queue": {**QUEUE, "failpoints": LEAVING_FAILPOINTS},
    "rollouts": {**ROLLOUTS, "failpoints": LEAVING_FAILPOINTS},
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_what_was_acked_is_there_once(variant: str, tmp_path: Path) -> None:
    number = list(VARIANTS).index(variant)
    kills = 1 if variant in ("a queue", "rollouts") else 2
    outcome = await crash(tmp_path, kills=kills, seed=number, **VARIANTS[variant])
    check_outcome(outcome, kills, VARIANTS[variant])


@pytest.mark.crash
@pytest.mark.parametrize("variant", VARIANTS)
async def test_what_was_acked_is_there_once_at_every_place(variant: str, tmp_path: Path) -> None:
    points = VARIANTS[variant].get("failpoints", FAILPOINTS)
    outcome = await crash(tmp_path, kills=len(points), seed=7, plan=[*points], **VARIANTS[variant])
    check_outcome(outcome, len(points), VARIANTS[variant])


def check_outcome(outcome: Outcome, kills: int, variant: dict[str, Any]) -> None:
    assert outcome.deaths.total() == kills
    capacity = variant.get("capacity")
    if capacity is None:
        assert outcome.transitions < 10**6
    else:  # on a machine with half the speed that the capacity is meant for
        assert outcome.wraps_per_s(capacity) > 0.5


def test_the_program_wants_a_ring_that_is_overwritten_every_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def crashed(folder: Path, *, kills: int, **variant: Any) -> Outcome:
        return Outcome(Counter({"kill -9": kills}), transitions=transitions, busy_s=2.0)

    monkeypatch.setattr(program, "crash", crashed)
    transitions = 2 * EVICTING
    program.main(["5"])
    transitions -= 1
    with pytest.raises(AssertionError, match="expected at least once"):
        program.main(["5"])
