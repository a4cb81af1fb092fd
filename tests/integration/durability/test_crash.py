"""A buffer server that is killed at any moment loses nothing that it acked, and doubles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.durability.crash import EVICTING, FAILPOINTS, POWER_FAILPOINTS, crash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VARIANTS: dict[str, dict[str, Any]] = {
    "all is kept": {},
    "the oldest are overwritten": {"capacity": EVICTING},
    "power": {"durability": "power", "failpoints": {**FAILPOINTS, **POWER_FAILPOINTS}},
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_what_was_acked_is_there_once(variant: str, tmp_path: Path) -> None:
    number = list(VARIANTS).index(variant)
    deaths = await crash(tmp_path, kills=3, seed=number, **VARIANTS[variant])
    assert sum(deaths.values()) >= 3


@pytest.mark.crash
@pytest.mark.parametrize("variant", VARIANTS)
async def test_what_was_acked_is_there_once_at_every_place(variant: str, tmp_path: Path) -> None:
    points = VARIANTS[variant].get("failpoints", FAILPOINTS)
    deaths = await crash(tmp_path, kills=len(points), seed=7, plan=[*points], **VARIANTS[variant])
    assert sum(deaths.values()) >= len(points)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("without", "places"),
    [
        ("marks", ["insert.settled", "journal.written"] * 3),
        ("journal", ["insert.stored"] * 2),
        ("wait", ["journal.before_write", "journal.half_written"] * 3),
        ("copy", ["checkpoint.pruned"] * 6),
    ],
)
async def test_without_what_keeps_it_the_promise_is_seen_to_be_broken(
    without: str, places: list[str], tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, Exception), match=""):
        await crash(
            tmp_path, kills=len(places), seed=1, plan=places, without=without, capacity=EVICTING
        )
