"""What `rlightning.policy` offers without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rlightning.policy
from rlightning.utils import builders

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import rlightning.policy
from rlightning.policy import PolicyClient, PolicyDescription, WeightPublisher
PolicyClient, PolicyDescription, WeightPublisher
try:
    rlightning.policy.BasePolicy
except ImportError as error:
    print(error)
"""

MAKING_NETWORKS = """
import sys
import numpy as np
from gymnasium.spaces import Box, Discrete
from rlightning.policy.builder import build_policy
from rlightning.types import EnvMeta
from rlightning.utils.config import PolicyConfig

def make(shape, **model_cfg):
    spaces = Box(0, 255, shape, np.uint8), Discrete(2)
    kind = "recurrent_actor_critic" if "memory" in model_cfg else "actor_critic"
    policy = build_policy(PolicyConfig(device="cpu", type=kind, model_cfg=model_cfg), "eval")
    policy.init_eval(env_meta=EnvMeta("env", spaces[1], spaces[0], 1))

make((4,))
make((4,), memory=8)
make((36, 36, 3), convolutions=[[8, 8, 4]])
print({"sympy", "tensordict"} & set(sys.modules))
"""


def printed_by(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    ).stdout.strip()


def test_the_client_needs_no_torch_and_the_rest_names_its_extra() -> None:
    expected = "rlightning.policy.BasePolicy needs torch: pip install 'rlightning[policy]'"
    assert printed_by(WITHOUT_TORCH) == expected


def test_every_name_is_there_and_others_are_not() -> None:
    for name in rlightning.policy.__all__:
        assert getattr(rlightning.policy, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rlightning.policy.Nothing


def test_builders_are_at_their_documented_path() -> None:
    assert builders.build_policy_group is rlightning.policy.build_policy_group
    with pytest.raises(AttributeError, match="no attribute 'build_engine'"):
        _ = builders.build_engine


def test_making_networks_loads_none_of_torchs_compiler() -> None:
    assert printed_by(MAKING_NETWORKS) == "set()"
