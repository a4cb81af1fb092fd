"""The built-in actor-critic policy: spaces, distributions, seeds."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.errors import ConfigError
from rlightning.policy import ActorCriticPolicy
from rlightning.policy.base_policy import PolicyInput
from rlightning.policy.encoder import ObservationEncoder
from rlightning.types import EnvMeta, Mode, PolicyResponse
from rlightning.utils.config import Config, PolicyConfig

VECTOR = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)


def make(action: Any, observation: Any = VECTOR, **config: Any) -> ActorCriticPolicy:
    policy = ActorCriticPolicy(PolicyConfig(device="cpu", **{"seed": 3, **config}), "eval")
    policy.init_eval(env_meta=EnvMeta("a", action, observation, 8))
    return policy


def act(policy: ActorCriticPolicy, observation: Any, mode: Mode = Mode.EXPLORE) -> PolicyResponse:
    with torch.inference_mode():
        return policy.rollout_step(PolicyInput("a", observation, mode=mode))


@pytest.mark.parametrize(
    ("action", "dtype", "shape"),
    [
        (gym.spaces.Discrete(5), torch.int64, ()),
        (gym.spaces.Discrete(5, start=10), torch.int64, ()),
        (gym.spaces.Box(-1, 1, (3,), np.float32), torch.float32, (3,)),
        (gym.spaces.Box(-1, 1, (2, 3), np.float32), torch.float32, (2, 3)),
        (gym.spaces.Box(-1, 1, (), np.float32), torch.float32, ()),
    ],
)
@pytest.mark.parametrize("mode", list(Mode))
def test_the_answer_agrees_with_the_distribution(
    action: Any, dtype: torch.dtype, shape: tuple[int, ...], mode: Mode
) -> None:
    policy = make(action)
    observation = torch.randn(64, 4)
    response = act(policy, observation, mode)
    assert response.action.dtype == dtype
    assert response.action.shape == (64, *shape)
    distribution = policy.distribution(policy.actor(observation))
    start = getattr(action, "start", 0)
    expected = distribution.log_prob(response.action - int(start))
    torch.testing.assert_close(response.log_prob, expected)
    torch.testing.assert_close(response.value, policy.critic(observation)[:, 0])
    assert response.value.dtype == response.log_prob.dtype == torch.float32
    if mode is Mode.EXPLOIT:
        best = (
            distribution.probs.argmax(-1) + int(start)
            if isinstance(action, gym.spaces.Discrete)
            else distribution.mean
        )
        torch.testing.assert_close(response.action, best)


def test_discrete_actions_are_drawn_with_their_probabilities() -> None:
    policy = make(gym.spaces.Discrete(3), model_cfg=Config(hidden=[]))
    bias = torch.tensor([0.2, 0.5, 0.3]).log()
    with torch.no_grad():
        policy.actor[-1].weight.zero_()  # type: ignore[index]
        policy.actor[-1].bias.copy_(bias)  # type: ignore[index]
    counts = torch.bincount(act(policy, torch.zeros(20_000, 4)).action, minlength=3) / 20_000
    torch.testing.assert_close(counts, bias.exp(), atol=0.015, rtol=0)


def test_box_actions_are_drawn_with_their_deviation() -> None:
    policy = make(gym.spaces.Box(-1, 1, (2,), np.float32))
    with torch.no_grad():
        policy.actor[1].log_std.copy_(torch.tensor([0.5, 2.0]).log())  # type: ignore[index]
    drawn = act(policy, torch.zeros(20_000, 4)).action
    torch.testing.assert_close(drawn.std(0), torch.tensor([0.5, 2.0]), rtol=0.03, atol=0)
    assert drawn.abs().max() > 1  # not cut to the space


def test_a_seed_fixes_weights_and_actions_and_leaves_torch_s_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (
        make(gym.spaces.Discrete(4)),
        make(gym.spaces.Discrete(4)),
        make(gym.spaces.Discrete(4), seed=4),
    )
    unseeded = make(gym.spaces.Discrete(4), seed=None)
    assert torch.equal(before, torch.random.get_rng_state())
    observation = torch.randn(50, 4)
    assert torch.equal(act(one, observation).action, act(two, observation).action)
    assert not torch.equal(act(one, observation).action, act(other, observation).action)
    assert unseeded.get_param_fingerprint().keys() == one.get_param_fingerprint().keys()


def test_weights_loaded_in_place_are_used() -> None:
    policy, other = make(gym.spaces.Discrete(4)), make(gym.spaces.Discrete(4), seed=9)
    observation = torch.randn(5, 4)
    policy.load_state_dict(other.get_trainable_parameters())
    assert torch.equal(act(policy, observation).value, act(other, observation).value)


def test_networks_of_one_s_own_need_only_actor_and_critic() -> None:
    class Mine(ActorCriticPolicy):
        def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
            self.actor = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 2))
            self.critic = nn.Linear(4, 1)

    policy = Mine(PolicyConfig(device="cpu"), "eval")
    policy.init_eval(env_meta=EnvMeta("a", gym.spaces.Discrete(2), VECTOR, 1))
    observation = torch.randn(3, 4)
    response = act(policy, observation, Mode.EXPLOIT)
    torch.testing.assert_close(response.action, policy.actor(observation).argmax(-1))
    torch.testing.assert_close(response.value, policy.critic(observation)[:, 0])


def test_hooks_on_a_network_are_called() -> None:
    calls: list[int] = []

    class Hooked(ActorCriticPolicy):
        def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
            super().construct_network(env_meta, **kwargs)
            self.critic.register_forward_hook(lambda *_: calls.append(1))

    policy = Hooked(PolicyConfig(device="cpu"), "eval")
    policy.init_eval(env_meta=EnvMeta("a", gym.spaces.Discrete(2), VECTOR, 1))
    act(policy, torch.randn(1, 4))
    assert calls == [1]


@pytest.mark.parametrize(
    ("config", "action", "observation", "message"),
    [
        (
            {"model_cfg": Config(hidden=64)},
            gym.spaces.Discrete(2),
            VECTOR,
            "model_cfg.hidden: expected a list",
        ),
        (
            {"model_cfg": Config(hidden=[64], activation="sine")},
            gym.spaces.Discrete(2),
            VECTOR,
            "'sine' is none of tanh",
        ),
        ({}, gym.spaces.MultiBinary(3), VECTOR, "acts in Discrete and Box spaces"),
        (
            {},
            gym.spaces.Discrete(2),
            gym.spaces.Dict({"say": gym.spaces.Text(5)}),
            "observation.say: .*cannot flatten",
        ),
    ],
)
def test_what_it_cannot_do_is_a_config_error(
    config: dict[str, Any], action: Any, observation: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(action, observation, **config)


def test_every_fixed_space_becomes_one_vector() -> None:
    space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "joints": gym.spaces.Box(-1, 1, (3,), np.float64),
            "tool": gym.spaces.Discrete(4, start=1),
            "switches": gym.spaces.MultiBinary(2),
            "dials": gym.spaces.MultiDiscrete([2, 3]),
            "pair": gym.spaces.Tuple(
                (gym.spaces.Box(0, 1, (), np.float32), gym.spaces.Discrete(2))
            ),
        }
    )
    encoder = ObservationEncoder(space)
    assert encoder.size == 12 + 3 + 4 + 2 + 5 + 1 + 2
    samples = [space.sample() for _ in range(5)]
    batch = {
        key: torch.as_tensor(np.stack([s[key] for s in samples]))
        for key in ("image", "joints", "tool", "switches", "dials")
    }
    batch["pair"] = tuple(
        torch.as_tensor(np.stack([s["pair"][i] for s in samples])) for i in (0, 1)
    )
    encoded = encoder(batch)
    assert encoded.shape == (5, encoder.size)
    assert encoded.dtype == torch.float32
    for row, sample in zip(encoded, samples, strict=True):
        parts = dict(
            zip(space, row.split([part.size for part in encoder._parts.values()]), strict=True)
        )
        np.testing.assert_allclose(parts["image"], sample["image"].ravel() / 255, rtol=1e-6)
        assert parts["tool"].argmax() + 1 == sample["tool"]
        assert parts["dials"][:2].argmax() == sample["dials"][0]
        assert parts["dials"][2:].argmax() == sample["dials"][1]


def test_leading_dimensions_of_time_and_rows_are_kept() -> None:
    encoder = ObservationEncoder(gym.spaces.Box(0, 255, (2, 3), np.uint8))
    assert encoder(torch.zeros(7, 5, 2, 3, dtype=torch.uint8)).shape == (7, 5, 6)
