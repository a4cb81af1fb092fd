"""The hooks around reset and step, statistics, timing."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
import torch

from rlightning.env import BaseEnv, EnvMeta
from rlightning.errors import ConfigError
from rlightning.types import EnvRet, PolicyResponse
from tests.unit.env.envs import answer, config


class Plain(BaseEnv):
    """Remembers what it was given, returns what it was told."""

    infos: list = []

    def reset(self, *args, **kwargs):
        return EnvRet(self.env_id, np.zeros(2), info={"args": (args, kwargs)}, ts_env_sent_ns=1)

    def step(self, policy_resp):
        self.given = self._preprocess_fn(policy_resp)
        return EnvRet(self.env_id, np.ones(2), 1.0, info=self.infos.pop(0) if self.infos else {})


def plain(**values):
    return Plain(config("none", **values), 3)


def test_identity_and_config():
    given = config("none", num_envs=4, max_episode_steps=9)
    env = Plain(given, 3)
    assert env.get_env_id().endswith("-3")
    assert env.get_env_id() != Plain(given, 3).get_env_id()
    assert env.config == given
    assert env.config is not given
    assert (env.num_envs, env.get_max_episode_steps()) == (4, 9)
    assert env.init() == env.get_metadata() == EnvMeta(env.env_id, None, None, 4)
    assert Plain(given, None).get_env_id().endswith("-0")
    assert env.is_finish() is False
    for hook in ("close", "offload", "reload", "finish_rollout", "apply_evaluate_cfg"):
        assert getattr(env, hook)() is None


def test_an_evaluation_that_the_class_cannot_have_is_refused():
    env = plain(evaluate_cfg={"max_episode_steps": 3})
    with pytest.raises(ConfigError, match=r"env\.evaluate_cfg: Plain cannot change its env"):
        env.apply_evaluate_cfg()


def test_no_asynchronous_step_of_its_own():
    with pytest.raises(NotImplementedError):
        plain().step_async([])
    with pytest.raises(NotImplementedError):
        plain().collect_async()


def test_reset_passes_its_arguments_and_is_stamped():
    env_ret = plain()._reset(1, seed=2)
    assert env_ret.info["args"] == ((1,), {"seed": 2})
    assert env_ret.ts_env_sent_ns > 1


def test_a_response_reaches_the_env_as_it_is():
    env = plain()
    action = np.array([1.0, 2.0])
    env._step(answer(env.env_id, action))
    assert env.given is action  # numpy stays numpy
    tensor = torch.ones(2)
    response = answer(env.env_id, {"a": tensor, "b": action})
    env._step(response)
    assert isinstance(env.given["a"], torch.Tensor)
    assert env.given["b"] is action
    assert response.action["a"] is tensor  # the caller's response was not changed


def test_preprocess_fn_makes_the_action():
    env = Plain(config("none"), 0, lambda response: response.action * 2)
    env._step(answer(env.env_id, np.array([3])))
    assert env.given.tolist() == [6]


def test_statistics_sum_what_came_in_episode_info():
    env = plain()
    env.infos = [
        {"episode_info": {"return": np.array([1.0, 2.0]), "won": True, "name": "x"}},
        {},
        {"episode_info": {"return": 4.0, "won": torch.tensor([False, True])}},
    ]
    for _ in range(3):
        env._step(PolicyResponse(env.env_id, action=0))
    assert env.get_env_stats(reset=True) == {"return": [7.0, 3], "won": [2.0, 3]}
    assert env.get_env_stats() == {}


def test_remote_storage_gets_arrays(monkeypatch):
    class Tensors(Plain):
        def step(self, policy_resp):
            return EnvRet(self.env_id, torch.ones(2))

    env = Tensors(config("none"))
    assert isinstance(env._step(answer("", 0)).observation, torch.Tensor)
    monkeypatch.setenv("RLIGHTNING_REMOTE_STORAGE", "1")
    assert isinstance(env._step(answer("", 0)).observation, np.ndarray)


def test_timing_has_fixed_memory_and_is_logged(caplog, monkeypatch):
    monkeypatch.setenv("RLIGHTNING_DEBUG", "1")
    env = plain()
    env._reset()
    for _ in range(3):
        env._step(answer(env.env_id, 0).mark_policy_sent())
    assert env.timing_raw.keys() == {"reset", "step", "transition_policy_to_env"}
    step = env.timing_raw["step"]
    assert step["count"] == 3
    assert step["avg"] == pytest.approx(step["total"] / 3)
    assert env.timing_raw["transition_policy_to_env"]["total"] > 0
    # From another machine: by the offset of its clock, or not at all, whatever its wall clock says.
    far = answer(env.env_id, 0).mark_policy_sent().mark_left((time.monotonic_ns() - 10**9, 10**6))
    far.ts_policy_sent_ns += 3600 * 10**9
    env._step(far)
    unknown = answer(env.env_id, 0)
    unknown.ts_policy_sent_ns = 1
    env._step(unknown)
    assert env.timing_raw["transition_policy_to_env"]["count"] == 4
    assert 1 <= env.timing_raw["transition_policy_to_env"]["total"] < 60
    assert env.latency["transition_policy_to_env"].summary()["uncertainty"] == pytest.approx(1e-3)
    with caplog.at_level(logging.DEBUG):
        env.print_timing_summary(reset=True)
    assert "step: count 5" in caplog.text
    assert "'p99':" in caplog.text
    assert env.latency == {}
    assert env.timing_raw == {}
