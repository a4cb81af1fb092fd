"""The Q-network policy: greedy, exploring by the published epsilon, and as it was stored."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import ConfigError
from rlightning.policy import QNetworkPolicy
from rlightning.policy.base_policy import PolicyInput
from rlightning.policy.weights import dump_weights, load_weights, parse_weights, policy_weights
from rlightning.types import EnvMeta, Mode
from rlightning.utils.config import PolicyConfig
from tests.unit.policy.policies import VECTOR

ACTIONS = gym.spaces.Discrete(3, start=5, dtype=np.int32)
ROWS = 3000


def make(role="eval", seed=0, action=ACTIONS):
    policy = QNetworkPolicy(PolicyConfig(seed=seed, device="cpu"), role)
    (policy.init_eval if role == "eval" else policy.init_train)(
        env_meta=EnvMeta("env", action, VECTOR, 1)
    )
    return policy


def act(policy, mode=Mode.EXPLORE, rows=ROWS):
    zeros = torch.zeros(rows)
    observation = torch.ones(rows, 4)
    with torch.inference_mode():
        response = policy.rollout_step(
            PolicyInput("env", observation, zeros, zeros, zeros, mode=mode)
        )
    return response.action


def test_exploits_with_the_action_of_the_highest_value():
    policy = make()
    best = int(policy.q_network(torch.ones(1, 4)).argmax()) + 5
    action = act(policy, Mode.EXPLOIT)
    assert action.dtype == np.int32
    assert set(action.tolist()) == {best}


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_explores_as_often_as_the_published_weights_say(epsilon):
    learner, policy = make("train", seed=1), make()
    learner.epsilon.fill_(epsilon)
    load_weights(policy, parse_weights(dump_weights(policy_weights(learner))))
    best = act(policy, Mode.EXPLOIT, 1)[0]
    other = float((act(policy) != best).mean())
    assert other == pytest.approx(epsilon * 2 / 3, abs=0.04)
    assert float(policy.epsilon) == pytest.approx(epsilon)


def test_before_the_first_publish_everything_is_random():
    counts = np.bincount(act(make()) - 5, minlength=3)
    assert counts / ROWS == pytest.approx([1 / 3] * 3, abs=0.04)


def test_other_spaces_are_refused():
    with pytest.raises(ConfigError, match="chooses in Discrete spaces"):
        make(action=gym.spaces.Box(0, 1, (1,)))
