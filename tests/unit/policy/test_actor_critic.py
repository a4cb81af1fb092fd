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
from rlightning.policy.forward import Forward
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
        (gym.spaces.Discrete(5), np.int64, ()),
        (gym.spaces.Discrete(5, start=10), np.int64, ()),
        (gym.spaces.Discrete(5, dtype=np.int32), np.int32, ()),
        (gym.spaces.Box(-1, 1, (3,), np.float32), np.float32, (3,)),
        (gym.spaces.Box(-1, 1, (2, 3), np.float32), np.float32, (2, 3)),
        (gym.spaces.Box(-1, 1, (), np.float32), np.float32, ()),
    ],
)
@pytest.mark.parametrize("mode", list(Mode))
def test_the_answer_agrees_with_the_distribution(
    action: Any, dtype: Any, shape: tuple[int, ...], mode: Mode
) -> None:
    policy = make(action)
    # Two logits of random rows may be equal but for rounding, which the two ways do differently.
    observation = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    response = act(policy, observation, mode)
    assert response.action.dtype == dtype
    assert response.action.shape == (64, *shape)
    assert response.value.dtype == response.log_prob.dtype == np.float32
    with torch.no_grad():
        distribution = policy.distribution(policy.actor(observation))
        value = policy.critic(observation)[:, 0]
    counted = torch.as_tensor(response.action - getattr(action, "start", 0))
    expected = distribution.log_prob(counted)
    torch.testing.assert_close(torch.as_tensor(response.log_prob), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.as_tensor(response.value), value, rtol=1e-5, atol=1e-5)
    if mode is Mode.EXPLOIT:
        discrete = isinstance(action, gym.spaces.Discrete)
        best = distribution.logits.argmax(-1) if discrete else distribution.mean
        torch.testing.assert_close(counted.to(best.dtype), best, rtol=1e-5, atol=1e-5)


def test_discrete_actions_are_drawn_with_their_probabilities() -> None:
    policy = make(gym.spaces.Discrete(4), model_cfg=Config(hidden=[]))
    bias = torch.tensor([0.2, 0.5, 0.3, 0.0]).log()
    with torch.no_grad():
        policy.actor[-1].weight.zero_()  # type: ignore[index]
        policy.actor[-1].bias.copy_(bias)  # type: ignore[index]
    drawn = act(policy, torch.zeros(20_000, 4)).action
    counts = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(counts, [0.2, 0.5, 0.3, 0.0], atol=0.015)


def test_box_actions_are_drawn_with_their_deviation() -> None:
    policy = make(gym.spaces.Box(-1, 1, (2,), np.float32))
    with torch.no_grad():
        policy.actor[1].log_std.copy_(torch.tensor([0.5, 2.0]).log())  # type: ignore[index]
    drawn = act(policy, torch.zeros(20_000, 4)).action
    np.testing.assert_allclose(drawn.std(0), [0.5, 2.0], rtol=0.03)
    assert np.abs(drawn).max() > 1  # not cut to the space


def test_a_seed_fixes_weights_and_actions_and_leaves_global_generators_alone() -> None:
    before = torch.random.get_rng_state()
    one, two = make(gym.spaces.Discrete(4)), make(gym.spaces.Discrete(4))
    other = make(gym.spaces.Discrete(4), seed=4)
    unseeded = make(gym.spaces.Discrete(4), seed=None)
    assert torch.equal(before, torch.random.get_rng_state())
    observation = torch.randn(50, 4)
    np.testing.assert_array_equal(act(one, observation).action, act(two, observation).action)
    assert (act(one, observation).action != act(other, observation).action).any()
    assert unseeded.get_param_fingerprint().keys() == one.get_param_fingerprint().keys()


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_weights_loaded_in_place_are_used(rows: int) -> None:
    policy, other = make(gym.spaces.Discrete(4)), make(gym.spaces.Discrete(4), seed=9)
    observation = torch.randn(rows, 4)
    policy.load_state_dict(other.get_trainable_parameters())
    np.testing.assert_array_equal(act(policy, observation).value, act(other, observation).value)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "gelu", "silu"])
@pytest.mark.parametrize("rows", [1, 1024])
def test_every_way_to_run_the_network_gives_the_same(activation: str, rows: int) -> None:
    policy = make(gym.spaces.Discrete(4), model_cfg=Config(hidden=[64, 64], activation=activation))
    observation = torch.randn(rows, 4)
    with torch.inference_mode():
        expected = policy.critic(observation).numpy()
        got = Forward(policy.critic, torch.device("cpu"))(observation)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_networks_of_one_s_own_need_only_actor_and_critic() -> None:
    class Mine(ActorCriticPolicy):
        def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
            self.actor = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 2))
            self.critic = nn.Linear(4, 1)

    policy = Mine(PolicyConfig(device="cpu"), "eval")
    policy.init_eval(env_meta=EnvMeta("a", gym.spaces.Discrete(2), VECTOR, 1))
    observation = torch.randn(3, 4)
    response = act(policy, observation, Mode.EXPLOIT)
    with torch.no_grad():
        best, value = policy.actor(observation).argmax(-1), policy.critic(observation)[:, 0]
    np.testing.assert_array_equal(response.action, best)
    np.testing.assert_allclose(response.value, value, atol=1e-6)


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


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        (gym.spaces.Discrete(10**8), VECTOR),
        (gym.spaces.Discrete(2**62), VECTOR),
        (gym.spaces.Discrete(2), gym.spaces.Discrete(10**9)),
        (gym.spaces.Discrete(2), gym.spaces.MultiDiscrete([10**9, 2])),
        (gym.spaces.Discrete(2), gym.spaces.MultiBinary(10**8)),
    ],
)
def test_spaces_that_need_networks_larger_than_the_cap_are_refused(
    action: Any, observation: Any
) -> None:
    with pytest.raises(ConfigError, match=r"hidden.* policy\.max_weights_bytes allows 4294967296"):
        make(action, observation)
    make(gym.spaces.Discrete(2), max_weights_bytes=2**20)
