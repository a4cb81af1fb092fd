"""The bounds of `make prove-robot`, each missed alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.netns import robot
from tests.netns.robot import Outcome, bounds

CONTROL = {
    "dropped": 0,
    "uncertain": 0,
    "held": 0,
    "missed": 0,
    "waited": 0,
    "age_p50_ms": 1.0,
    "age_p99_ms": 2.0,
}
GOOD = Outcome(
    lasted_s=300.0,
    steps=4500,
    stored=4500,
    lost=0,
    control=CONTROL,
    told_dropped=0,
    sources={"POLICY": 4500, "HOLD": 0},
    late=0,
    periods=np.full(100, 1 / 15),
    healed=[("cut of 1 s", 1.0)],
    reconnects=0,
)


@pytest.mark.parametrize(
    ("first", "second", "missed"),
    [
        ({}, {}, []),
        ({"lasted_s": 299.9}, {}, ["from the first step to the last, 10 Hz, s"]),
        ({}, {"lasted_s": 299.9}, ["from the first step to the last, 15 Hz, s"]),
        ({}, {"periods": np.full(9, 0.075)}, ["control period p99 / nominal, 15 Hz"]),
        ({}, {"healed": [("cut", 2.1)]}, ["fresh action after the link returns, s"]),
        ({}, {"lost": 1, "told_dropped": 1}, ["lost or invented transitions, 15 Hz"]),
    ],
)
def test_each_bound_fails_the_program(
    first: dict[str, Any],
    second: dict[str, Any],
    missed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes = replace(GOOD, **first), replace(GOOD, **second)
    assert [bound.name for bound in bounds(*outcomes) if not bound.met] == missed
    monkeypatch.setattr(robot, "restarts", lambda *_, **__: outcomes[0])
    monkeypatch.setattr(robot, "narrow", lambda *_, **__: outcomes[1])
    monkeypatch.setattr(robot, "check", lambda outcome: None)
    monkeypatch.setattr(robot.signal, "signal", lambda *_: None)
    assert robot.main() == bool(missed)
    lines = [line for line in capsys.readouterr().out.splitlines() if "missed |" in line]
    assert [line.split(" | ")[0] for line in lines] == [f"| {name}" for name in missed]
