from __future__ import annotations

import gymnasium as gym
import pytest

from rlightning.types import EnvMeta, Mode, Purpose
from rlightning.v1 import policy_service_pb2


def test_everything_is_optional_and_compared_by_value():
    assert EnvMeta() == EnvMeta(None, None, None, None)
    space = gym.spaces.Discrete(2)
    assert EnvMeta("a", space, space, 4) == EnvMeta("a", gym.spaces.Discrete(2), space, 4)
    assert EnvMeta("a") != EnvMeta("b")


def test_fields_are_known_without_an_instance():
    assert EnvMeta._fields == ("env_id", "action_space", "observation_space", "num_envs")
    assert EnvMeta("a")._fields is EnvMeta._fields


def test_it_has_no_hash():
    with pytest.raises(TypeError):
        hash(EnvMeta("a"))


@pytest.mark.parametrize(
    ("kind", "wire", "prefix"),
    [(Mode, policy_service_pb2.Mode, "MODE"), (Purpose, policy_service_pb2.Purpose, "PURPOSE")],
)
def test_modes_have_the_numbers_of_the_wire(kind, wire, prefix):
    assert {f"{prefix}_{item.name}": int(item) for item in kind} == {
        name: number for name, number in wire.items() if number
    }
