"""DQN: targets computed by hand, what weighs a row, exploration, and going on from a state."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import ConfigError, PolicyError
from tests.unit.learner.replayed import B, copy_of, make_columns, make_learner

THREE = gym.spaces.Discrete(3, start=2)
ACTIONS = np.arange(B) % 3 + 2


def make(**learner):
    return make_learner("dqn", THREE, **{"gamma": 0.9, **learner})


def columns(**overrides):
    return make_columns(ACTIONS, **overrides)


def values(learner, observation):
    with torch.no_grad():
        return learner.policy.q_network(torch.tensor(observation)).numpy()


def target_of(learner):
    """The state dict of the target network."""
    params = learner._loss.target_value_network_params.items(True, True)
    return {".".join(name[4:]): value for name, value in params if isinstance(name, tuple)}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("discount", [None, 0.9**3])
def test_priorities_are_the_errors_that_are_computed_by_hand(double, discount):
    learner = make(double=double, tau=0.05)
    for rng in range(5):  # so that the target network differs from the trained one
        learner.update(columns(rng=rng))
    data = columns(rng=9, terminated=np.arange(B) < 8, truncated=np.arange(B) > 28)
    if discount is not None:
        data["discount"] = np.full(B, discount, np.float32)
    now, after = values(learner, data["observation"]), values(learner, data["next_observation"])
    network = make().policy.q_network
    network.load_state_dict(target_of(learner))
    with torch.no_grad():
        valued = network(torch.tensor(data["next_observation"])).numpy()
    best = (after if double else valued).argmax(1)
    following = valued[np.arange(B), best] * ~data["terminated"]
    expected = data["reward"] + (discount or 0.9) * following - now[np.arange(B), ACTIONS - 2]
    learner.update(data)
    assert learner.priorities == pytest.approx(np.abs(expected) + 1e-6, abs=2e-5)


def test_truncated_and_cut_bootstrap():
    weights = [make_and_update(**{name: np.arange(B) < 8}) for name in ("truncated", "cut")]
    assert weights[0] == weights[1] == make_and_update()
    assert make_and_update(terminated=np.arange(B) < 8) != weights[0]


def make_and_update(**overrides):
    learner = make()
    learner.update(columns(**overrides))
    return learner.weights()


def test_a_row_of_weight_0_is_not_learned_from():
    weight = np.ones(B, np.float32)
    weight[3] = 0.0
    one = columns(sample_weight=weight)
    reward = one["reward"].copy()
    reward[3] += 100.0
    learners = [make(), make()]
    learners[0].update(one)
    learners[1].update({**one, "reward": reward})
    assert learners[0].weights() == learners[1].weights()


def test_the_target_network_moves_in_its_intervals():
    learner = make(tau=1.0, target_interval=2)

    def lag():
        trained = learner.policy.q_network.state_dict()
        return max(float((v - trained[k]).abs().max()) for k, v in target_of(learner).items())

    learner.update(columns())
    assert lag() > 0.0
    learner.update(columns())
    assert lag() == 0.0


def test_epsilon_falls_with_env_steps_and_is_published():
    learner = make(epsilon_start=0.9, epsilon_end=0.1, epsilon_steps=100)
    for steps, epsilon in [(0, 0.9), (50, 0.5), (100, 0.1), (1000, 0.1)]:
        learner.explore(steps)
        assert float(learner.policy.epsilon) == pytest.approx(epsilon)
    published = learner.policy.get_trainable_parameters()["exploration"]["epsilon"]
    assert float(published) == pytest.approx(0.1)


def test_a_learner_that_goes_on_takes_the_same_steps():
    learner = make(tau=0.1)
    for rng in range(3):
        learner.update(columns(rng=rng))
    other = copy_of(learner, lambda: make(tau=0.1))
    for rng in range(3, 6):
        first, second = learner.update(columns(rng=rng)), other.update(columns(rng=rng))
        assert first == second
    assert learner.weights() == other.weights()


def test_a_reward_that_is_no_number_is_refused_and_nothing_changes():
    learner = make()
    before = learner.weights()
    with pytest.raises(PolicyError, match="reward is not finite"):
        learner.update(columns(reward=np.full(B, np.nan, np.float32)))
    with pytest.raises(PolicyError, match="a gradient is not finite"):
        learner.update(columns(observation=np.full((B, 3), np.nan, np.float32)))
    assert learner.weights() == before


def test_actions_must_be_discrete():
    with pytest.raises(ConfigError, match="Discrete"):
        make_learner("dqn", gym.spaces.Box(-1.0, 1.0, (1,)))


def test_a_policy_without_a_q_network_is_refused():
    with pytest.raises(ConfigError, match="it needs the module 'q_network'"):
        make_learner("dqn", THREE, policy={"type": "actor_critic"})
