from __future__ import annotations

import numpy as np

from rlightning.buffer.parts import joined, split


def test_episodes_of_several_lengths_are_laid_one_after_the_other_and_told_apart() -> None:
    episodes = [{"x": {"a": np.arange(n)}, "y": (np.full((n, 2), n),)} for n in (3, 1, 2)]
    columns, metadata = joined(episodes)
    assert metadata == {"lengths": [3, 1, 2]}
    assert columns["x"]["a"].tolist() == [0, 1, 2, 0, 0, 1]
    for mine, other in zip(split(columns, metadata["lengths"]), episodes, strict=True):
        np.testing.assert_array_equal(mine["x"]["a"], other["x"]["a"])
        np.testing.assert_array_equal(mine["y"][0], other["y"][0])
    whole = {"x": np.zeros(3)}
    assert joined(whole) == (whole, {})
