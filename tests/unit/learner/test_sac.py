"""SAC: what its critics learn, units of actions, the temperature, seeds, going on from a state."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl.modules import TanhNormal

from rlightning.errors import ConfigError
from rlightning.types import EnvMeta, EnvRet, Mode
from tests.unit.learner.replayed import VECTOR, B, copy_of, make_columns, make_learner

BOX = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
SCALED = np.random.default_rng(7).uniform(-1, 1, (B, 2)).astype(np.float32)
ACTIONS = (BOX.low + (SCALED + 1) * (BOX.high - BOX.low) / 2).astype(np.float32)


def make(action=BOX, **learner):
    return make_learner("sac", action, **{"gamma": 0.9, **learner})


def columns(**overrides):
    return make_columns(overrides.pop("action", ACTIONS), **overrides)


def weights_after(space, **overrides):
    learner = make(space)
    for rng in range(3):
        learner.update(columns(rng=rng, **overrides))
    return learner.policy.actor.state_dict()


def test_critics_of_what_terminated_learn_the_reward():
    learner = make(tau=0.01)
    data = columns(terminated=np.ones(B, bool), reward=SCALED[:, 0].copy())
    first = learner.update(data)["losses/value"]
    for _ in range(60):
        last = learner.update(data)["losses/value"]
    assert last < first / 3
    assert learner.priorities.shape == (B,)


def test_the_units_of_an_action_do_not_matter():
    unit = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    one, other = weights_after(BOX), weights_after(unit, action=SCALED)
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=1e-4), name


def test_the_temperature_falls_while_there_is_more_entropy_than_wanted():
    alphas = []
    for target in (-50.0, 50.0):
        learner = make(target_entropy=target)
        for rng in range(10):
            alpha = learner.update(columns(rng=rng))["losses/alpha"]
        alphas.append(alpha)
    assert alphas[0] < 1.0 < alphas[1]


def test_the_seed_decides_whatever_else_draws_random_numbers():
    def run(seed, draws):
        learner = make_learner("sac", BOX, seed=seed)
        for rng in range(2):
            torch.rand(draws)
            learner.update(columns(rng=rng))
        return learner.weights()

    assert run(1, 0) == run(1, 5) != run(2, 0)


def test_a_learner_that_goes_on_takes_the_same_steps():
    learner = make()
    for rng in range(3):
        learner.update(columns(rng=rng))
    other = copy_of(learner, make)
    for rng in range(3, 6):
        assert learner.update(columns(rng=rng)) == other.update(columns(rng=rng))
    assert learner.weights() == other.weights()


def test_only_the_actor_is_published_and_it_acts_as_it_was_trained():
    learner = make()
    learner.update(columns())
    assert learner.policy.get_trainable_parameters().keys() == {"actor"}
    policy = learner.policy
    observation = torch.rand(5, 3)
    env_ret = EnvRet("env", observation)
    env_ret.mode = Mode.EXPLOIT
    with torch.inference_mode():
        mean, std = policy.gaussian(policy.actor(observation))
        low, high = torch.tensor(BOX.low), torch.tensor(BOX.high)
        expected = TanhNormal(mean, std, low=low, high=high).deterministic_sample
        action = policy.rollout_step(env_ret).action
    assert action == pytest.approx(expected.numpy(), abs=1e-5)


def test_exploring_stays_within_bounds_and_spreads():
    learner = make()
    policy = learner.policy
    env_ret = EnvRet("env", torch.zeros(5000, 3))
    with torch.inference_mode():
        action = policy.rollout_step(env_ret).action
    assert action.dtype == np.float32
    assert (action >= BOX.low).all()
    assert (action <= BOX.high).all()
    # The first weights mean about tanh of a standard normal: deviation 0.63 of half the width.
    assert action.std(0) == pytest.approx([1.26, 3.14], rel=0.05)


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(2), gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)]
)
def test_actions_need_bounds(space):
    with pytest.raises(ConfigError, match="Box spaces with finite bounds"):
        make(space)


def test_nested_observations_reach_the_critics():
    space = gym.spaces.Dict({"a": VECTOR, "b": gym.spaces.Tuple((VECTOR, gym.spaces.Discrete(2)))})
    learner = make_learner("sac", BOX, observation=space)
    part = np.zeros((B, 3), np.float32)
    observation = {"a": part, "b": (part, np.arange(B) % 2)}
    data = columns(observation=observation, next_observation=observation)
    assert np.isfinite(list(learner.update(data).values())).all()
    assert EnvMeta("e", BOX, space, B)
