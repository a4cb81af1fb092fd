"""What is told of a buffer server's rows before they are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer.remote_storage import _is_over
from rlightning.types import EnvRet


@pytest.mark.parametrize(
    ("terminated", "truncated", "over"),
    [
        (False, False, False),
        (True, False, True),
        (np.array([True, False]), np.array([False, True]), True),
        (np.array([True, False]), np.array([False, False]), False),
        ({"a": False, "b": False}, {"b": False, "a": False}, False),
        ({"a": True, "b": False}, {"b": False, "a": True}, False),
        ({"a": True, "b": False}, {"b": True, "a": False}, True),
        ({"a": np.array([True, False])}, False, False),
        ({"a": np.array([True, True])}, False, True),
    ],
)
def test_an_episode_is_over_when_it_is_for_each_row_and_agent(
    terminated: Any, truncated: Any, over: bool
) -> None:
    assert _is_over(EnvRet("env", 0, 0.0, terminated, truncated)) is over
