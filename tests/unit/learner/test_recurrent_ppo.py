"""PPO over sequences: the memory it trains, and that it learns what needs one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import ConfigError, PolicyError
from rlightning.learner import build_learner
from rlightning.learner.recurrent_ppo import RecurrentPPO
from rlightning.policy import ActorCriticPolicy, PolicyGroup, build_policy
from rlightning.policy.weights import load_weights, parse_weights
from rlightning.types import ActionSource, BatchedData, EnvMeta, EnvRet
from rlightning.utils.config import MainConfig

SPACE = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
META = EnvMeta("env", gym.spaces.Discrete(2), SPACE, 32)
LENGTH, EPISODES, N = 3, 3, 32


def config(**policy: Any) -> MainConfig:
    small = {"hidden": [16], "activation": "tanh", "memory": 16}
    base = {"type": "recurrent_actor_critic", "seed": 1, "device": "cpu", "model_cfg": small}
    return MainConfig.from_dict(
        {
            "policy": {**base, "store_state": True, **policy},
            "train": {"seed": 0, "lr": 0.01, "batch_size": 96},
            "learner": {"epochs": 4, "gamma": 0.9, "anneal_lr": False},
        }
    )


class Recall:
    """Shows a cue of N rows, then nothing; at the end, what was the cue is worth 1, else -1."""

    def __init__(self, group: PolicyGroup) -> None:
        self._group = group
        self._rng = np.random.default_rng(0)
        self._ended = np.ones(N, bool)

    def rollout(self) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for _ in range(EPISODES):
            cue = self._rng.integers(0, 2, N)
            for t in range(LENGTH):
                seen = np.zeros((N, 2), np.float32)
                seen[:, 0] = (2.0 * cue - 1.0) * (t == 0)
                seen[:, 1] = t == LENGTH - 1
                ret = EnvRet("env", seen, np.zeros(N), self._ended, np.zeros(N, bool))
                answer = self._group.rollout_batch(BatchedData(["env"], [ret]))["env"]
                last = t == LENGTH - 1
                self._ended = np.full(N, last)
                rows.append(
                    {
                        **answer.to_dict(),
                        "observation": seen,
                        "reward": np.float32(2 * (answer.action == cue) - 1) * last,
                        "terminated": self._ended,
                        "truncated": np.zeros(N, bool),
                        "cut": np.zeros(N, bool),
                        "action_source": np.full(N, ActionSource.POLICY, np.int8),
                    }
                )
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        columns["next_observation"] = np.roll(columns["observation"], -1, axis=0)
        return columns


def acting(config: MainConfig) -> tuple[PolicyGroup, Any]:
    policy = build_policy(config.policy, "eval")
    group = PolicyGroup([], [policy], config.policy)
    group.init_eval(env_meta=META)
    return group, policy


def test_it_learns_what_only_a_memory_can() -> None:
    main = config()
    ppo = build_learner(main, META)
    group, policy = acting(main)
    recall = Recall(group)
    means = []
    for _ in range(60):
        load_weights(policy, parse_weights(ppo.weights()))
        columns = recall.rollout()
        metrics = ppo.update(columns)
        means.append(columns["reward"].sum() / (N * EPISODES))
        if means[-1] > 0.9:
            break
    assert abs(means[0]) < 0.4
    assert means[-1] > 0.9, means
    assert np.isfinite(list(metrics.values())).all()


def test_what_is_remembered_over_a_sequence_is_what_was_acted_on() -> None:
    main = config()
    ppo = build_learner(main, META)
    assert isinstance(ppo, RecurrentPPO)
    group, policy = acting(main)
    load_weights(policy, parse_weights(ppo.weights()))
    columns = Recall(group).rollout()
    rollout = ppo._read(columns)
    ppo._evaluate(rollout)
    value, next_value = (
        ppo._value_norm.normalize(rollout[name][..., None])[..., 0].numpy()
        for name in ("value", "next_value")
    )
    np.testing.assert_allclose(value, columns["value"], atol=1e-5)
    # A row that goes on is valued as its next one is.
    ahead = ~columns["terminated"][:-1]
    np.testing.assert_allclose(next_value[:-1][ahead], columns["value"][1:][ahead], atol=1e-5)


def test_gradients_reach_the_memory_and_rows_of_others_do_not_count() -> None:
    main = config()
    ppo = build_learner(main, META)
    group, _ = acting(main)
    columns = Recall(group).rollout()
    before = {k: v.clone() for k, v in ppo.policy.memory.state_dict().items()}  # type: ignore[attr-defined]
    others = columns | {"action_source": np.full_like(columns["action_source"], ActionSource.HUMAN)}
    metrics = ppo.update(others)
    assert metrics["losses/masked_rows"] == N * LENGTH * EPISODES
    after = ppo.policy.memory.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    columns["action_source"][2:4] = ActionSource.HUMAN
    assert ppo.update(columns)["losses/masked_rows"] == 2 * N
    assert not any(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_its_state_holds_the_memory() -> None:
    main = config()
    first, second = build_learner(main, META), build_learner(main, META)
    group, _ = acting(main)
    columns = Recall(group).rollout()
    first.update(columns)
    second.restore(deepcopy(first.state()))
    assert first.weights() == second.weights()
    for learner in (first, second):
        learner.update(columns)
    assert first.weights() == second.weights()


def test_what_it_cannot_train_is_said() -> None:
    with pytest.raises(ConfigError, match="policy.store_state must be true"):
        build_learner(config(store_state=False), META)
    vtrace = config()
    vtrace.learner.algorithm = "vtrace"
    with pytest.raises(ConfigError, match="'vtrace' cannot train.*the policy remembers"):
        build_learner(vtrace, META)
    with patch.object(ActorCriticPolicy, "initial_state", lambda self, n: torch.zeros(n, 1)):
        with pytest.raises(ConfigError, match="'ppo' trains one with a module 'memory'"):
            build_learner(config(type="actor_critic", model_cfg={"hidden": [8]}), META)
    ppo = build_learner(config(), META)
    group, _ = acting(config())
    columns = Recall(group).rollout()
    del columns["state"]
    with pytest.raises(PolicyError, match="needs a column 'state'"):
        ppo.update(columns)
    with pytest.raises(ConfigError, match="policy.model_cfg.memory: expected a number of units"):
        build_learner(config(model_cfg={"memory": "much"}), META)
    with pytest.raises(ConfigError, match=r"GRU of 2 inputs .*max_weights_bytes allows 1000"):
        build_learner(config(max_weights_bytes=1000), META)
