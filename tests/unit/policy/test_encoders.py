"""What is before the heads of an actor-critic: convolutions, and scales that are learned."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import ConfigError
from rlightning.policy import ActorCriticPolicy, build_policy
from rlightning.policy.base_policy import PolicyInput
from rlightning.policy.observation_norm import ObservationNorm
from rlightning.types import EnvMeta, Mode, PolicyResponse
from rlightning.utils.config import Config, PolicyConfig
from rlightning.utils.registry import POLICY

VECTOR = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
FIRST = gym.spaces.Box(0, 255, (4, 20, 24), np.uint8)
LAST = gym.spaces.Box(0, 255, (20, 24, 4), np.uint8)
LAYERS: dict[str, Any] = {"convolutions": [[8, 4, 2], [16, 3, 1]], "features": 32, "hidden": []}
ACTION = gym.spaces.Discrete(3)


def make(space: Any, model_cfg: dict[str, Any], policy_type: str = "actor_critic") -> Any:
    config = PolicyConfig(
        type=policy_type, device="cpu", seed=3, model_cfg=Config(**model_cfg), store_state=True
    )
    policy = build_policy(config, "eval")
    policy.init_eval(env_meta=EnvMeta("a", ACTION, space, 8))
    return policy


def act(policy: ActorCriticPolicy, observation: Any, **more: Any) -> PolicyResponse:
    with torch.inference_mode():
        return policy.rollout_step(PolicyInput("a", observation, mode=Mode.EXPLOIT, **more))


def pictures(rows: int, space: gym.spaces.Box = FIRST) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(0).integers(0, 256, (rows, *space.shape), "u1"))


def test_both_networks_begin_at_what_convolutions_make_of_a_picture() -> None:
    policy = make(FIRST, LAYERS)
    x = pictures(5)
    response = act(policy, x)
    with torch.no_grad():
        features = policy.features(x)
        value = policy.critic(features)[:, 0]
    assert features.shape == (5, 32)
    assert (features > 0).any()
    np.testing.assert_allclose(response.value, value, atol=1e-6)
    assert set(policy.get_trainable_parameters()) == {"features", "actor", "critic"}


def test_channels_may_come_last() -> None:
    first, last = make(FIRST, LAYERS), make(LAST, LAYERS)
    last.load_state_dict(first.get_trainable_parameters())
    x = pictures(3)
    np.testing.assert_allclose(
        act(last, x.permute(0, 2, 3, 1)).value, act(first, x).value, atol=1e-6
    )


def test_a_q_network_and_a_memory_look_at_pictures_too() -> None:
    q_network = make(FIRST, LAYERS, "q_network")
    assert act(q_network, pictures(4)).action.shape == (4,)
    memory = make(FIRST, LAYERS, "recurrent_actor_critic")
    response = act(memory, pictures(4), state=memory.initial_state(4))
    assert response.next_state.shape == (4, 64)
    over_time = memory.memory(
        pictures(6).view(2, 3, *FIRST.shape),
        torch.zeros(2, 3, 64),
        torch.ones(2, 3, dtype=torch.bool),
    )
    assert over_time.shape == (2, 3, 64)


def test_a_scale_is_that_of_all_that_was_seen() -> None:
    norm = ObservationNorm(2)
    x = torch.randn(1000, 2) * torch.tensor([5.0, 0.01]) + torch.tensor([100.0, -3.0])
    for part in (x[:1], x[1:500], x[500:]):
        norm.update(part)
    norm.update(x[:0])
    torch.testing.assert_close(norm.mean, x.mean(0))
    torch.testing.assert_close(norm.variance, x.var(0, correction=0), rtol=1e-4, atol=1e-6)
    assert float(norm.count) == 1000
    scaled = norm(x)
    torch.testing.assert_close(scaled.std(0), torch.ones(2), rtol=1e-2, atol=0)
    assert norm(torch.tensor([[1e9, -3.0]]))[0].tolist() == pytest.approx([10, 0], abs=0.2)


@pytest.mark.parametrize("rows", [1, 1024])
def test_who_acts_sees_observations_at_the_published_scale(rows: int) -> None:
    trained, acting = (make(VECTOR, {"normalize": True}) for _ in range(2))
    shift = torch.tensor([100.0, 0.0, -50.0, 3.0])
    trained.actor[0].norm.update(torch.randn(500, 4) * 7 + shift)
    weights = trained.get_trainable_parameters()
    acting.load_state_dict({name: dict(state) for name, state in weights.items()})
    x = torch.randn(rows, 4) * 7 + shift
    with torch.no_grad():
        expected = trained.critic(x)[:, 0].numpy()
        plain = trained.critic[1:](x)[:, 0].numpy()
    np.testing.assert_allclose(act(acting, x).value, expected, atol=1e-5)
    assert np.abs(expected - plain).max() > 1e-2


@pytest.mark.parametrize(
    ("space", "model_cfg", "policy_type", "message"),
    [
        (VECTOR, LAYERS, "actor_critic", "expected observations that are one picture"),
        (FIRST, {"convolutions": [[8, 4]]}, "actor_critic", r"list of \[channels, kernel, stride"),
        (FIRST, {"convolutions": [[8, 99, 1]]}, "actor_critic", "a kernel of 99 on 20 x 24"),
        (FIRST, {**LAYERS, "features": 10**9}, "actor_critic", "max_weights_bytes allows"),
        (FIRST, {**LAYERS, "features": "many"}, "actor_critic", "features: expected a number"),
        (FIRST, {**LAYERS, "normalize": True}, "actor_critic", "pictures have one scale"),
        (VECTOR, {"normalize": 1}, "actor_critic", "normalize: expected a bool"),
        (VECTOR, {"normalize": True}, "q_network", "'q_network' does not have it; it has hidden,"),
        (VECTOR, {"hiddn": [3]}, "sac_actor", "model_cfg.hiddn: .* did you mean 'hidden'?"),
        (VECTOR, {"memory": 8}, "actor_critic", "model_cfg.memory: policy.type 'actor_critic'"),
    ],
)
def test_what_cannot_be_made_is_refused(
    space: Any, model_cfg: dict[str, Any], policy_type: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(space, model_cfg, policy_type)


class Wider(ActorCriticPolicy):
    """Somebody else's: has an option of its own."""


def test_a_class_of_somebody_else_s_has_options_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICY._entries, "wider", Wider)
    assert isinstance(make(VECTOR, {"wide": 3}, "wider"), Wider)
    policy = Wider(PolicyConfig(device="cpu", model_cfg=Config(wide=3)), "eval")
    policy.init_eval(env_meta=EnvMeta("a", ACTION, VECTOR, 8))


def test_deviations_begin_where_the_config_says() -> None:
    config = PolicyConfig(device="cpu", model_cfg=Config(log_std=-2))
    policy = ActorCriticPolicy(config, "eval")
    policy.init_eval(env_meta=EnvMeta("a", gym.spaces.Box(-1, 1, (2,), np.float32), VECTOR, 1))
    with torch.no_grad():
        deviation = policy.distribution(policy.actor(torch.zeros(1, 4))).stddev
    torch.testing.assert_close(deviation, torch.full((1, 2), float(np.exp(-2))))
