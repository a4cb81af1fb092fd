from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.buffer.utils.preprocessors import (
    BoxFlattenPreprocessor,
    DiscretePreprocessor,
    NonPreprocessor,
    get_preprocessor_cls,
)

BOX = gym.spaces.Box(0, 1, (2, 3), np.float32)
DISCRETE = gym.spaces.Discrete(3, start=1)


def test_a_box_is_flattened() -> None:
    flatten = BoxFlattenPreprocessor(BOX)
    assert flatten.shape == (6,)
    assert flatten(np.zeros((2, 3))).shape == (6,)
    assert flatten.batch_transform(np.zeros((4, 2, 3))).shape == (4, 6)
    assert flatten.batch_transform((np.zeros((2, 3)),) * 4).shape == (4, 6)


def test_a_discrete_becomes_one_hot() -> None:
    one_hot = DiscretePreprocessor(DISCRETE)
    assert one_hot.shape == (3,)
    assert one_hot(np.array(2)).tolist() == [0, 1, 0]
    assert one_hot.batch_transform((np.array(1), np.array(3))).tolist() == [[1, 0, 0], [0, 0, 1]]
    vector = one_hot(torch.tensor(3))
    assert isinstance(vector, torch.Tensor)
    assert vector.tolist() == [0, 0, 1]


def test_anything_else_stays() -> None:
    space = gym.spaces.MultiBinary(4)
    stay = NonPreprocessor(space)
    value = np.ones(4)
    assert stay.shape == (4,)
    assert stay(value) is value
    assert stay.batch_transform(value) is value
    assert stay({"a": 1}) == {"a": 1}


def test_each_space_has_its_class() -> None:
    assert get_preprocessor_cls(BOX) is BoxFlattenPreprocessor
    assert get_preprocessor_cls(DISCRETE) is DiscretePreprocessor
    assert get_preprocessor_cls(gym.spaces.MultiBinary(2)) is NonPreprocessor


def test_wrong_spaces_and_values_are_refused() -> None:
    with pytest.raises(AssertionError, match="expected a Box"):
        BoxFlattenPreprocessor(DISCRETE)
    with pytest.raises(AssertionError, match="expected a Discrete"):
        DiscretePreprocessor(BOX)
    with pytest.raises(AssertionError, match="got str"):
        NonPreprocessor(BOX)("text")
