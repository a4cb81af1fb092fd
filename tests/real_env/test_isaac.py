"""Isaac Lab on Newton's CPU physics through real servers, and stepped directly."""

from __future__ import annotations

import numpy as np
import pytest

from tests.real_env.harness import Recorder, assert_same, collect, in_own_process, row_seeds
from tests.real_env.isaac_assets import double_pendulum, single_pendulum

pytestmark = pytest.mark.real_env

ROWS = 8
LIMIT = 60
CASES = {
    "isaac_manager_based": ("Isaac-Cartpole", "robot", "distant_light", single_pendulum),
    "isaac_marl": ("Isaac-Pendulum-MARL-Direct", "robot", "light", double_pendulum),
}


def asset(make, folder):
    return str(make(folder))


def overrides(entity, light, usd):
    return {
        "sim": {"physics": {"use_cuda_graph": False}},
        "scene": {"ground": None, light: None, entity: {"spawn": {"usd_path": usd}}},
    }


def directly(backend, usd, actions):
    """Steps Isaac Lab's own env with tensors, and nothing of ours."""
    import gymnasium as gym
    import isaaclab_tasks  # noqa: F401
    import torch
    from isaaclab_tasks.utils import parse_env_cfg

    task, entity, light, _ = CASES[backend]
    cfg = parse_env_cfg(task, device="cpu", num_envs=ROWS)
    cfg.sim.physics.use_cuda_graph = False
    cfg.scene.ground = None
    setattr(cfg.scene, light, None)
    getattr(cfg.scene, entity).spawn.usd_path = usd
    cfg.compute_final_obs = True
    cfg.seed = row_seeds(1)[0]
    cfg.episode_length_s = LIMIT * cfg.decimation * cfg.sim.dt
    env = gym.make(task, cfg=cfg, disable_env_checker=True)
    step = one_agent if backend == "isaac_manager_based" else many_agents
    recorder = Recorder()
    now, _ = env.reset(seed=cfg.seed)
    now = step(now, None)
    for t in range(200):
        if isinstance(actions, dict):
            action = {agent: torch.as_tensor(one[t]) for agent, one in actions.items()}
        else:
            action = torch.as_tensor(actions[t])
        observation, reward, terminated, truncated, extras = env.step(action)
        after = step(observation, None)
        first, ended = ended_of(terminated, truncated)
        last = step(extras, first) if ended.any() else after
        recorder.add(
            now,
            arrays(reward),
            arrays(terminated),
            arrays(truncated, ended),
            choose(ended, last, after),
        )
        now = after
    env.close()
    return recorder.columns()


def one_agent(value, first):
    return np.array(value.get("final_obs", value)["policy"])


def many_agents(value, first):
    if first is not None:
        value = {agent: value[agent]["final_obs"] for agent in first}
    return {agent: np.array(one) for agent, one in value.items()}


def ended_of(terminated, truncated):
    if not isinstance(terminated, dict):
        return None, np.array(terminated | truncated)
    dead = np.stack([np.array(one) for one in terminated.values()]).all(0)
    late = np.stack([np.array(one) for one in truncated.values()]).all(0)
    return list(terminated), dead | late


def arrays(value, mask=None):
    if isinstance(value, dict):
        return {agent: arrays(one, mask) for agent, one in value.items()}
    return np.array(value) if mask is None else np.array(value) & mask


def choose(ended, last, after):
    if isinstance(last, dict):
        return {agent: choose(ended, last[agent], after[agent]) for agent in last}
    return np.where(ended[:, None], last, after)


@pytest.mark.parametrize("backend", list(CASES))
async def test_transitions_are_those_of_the_env_itself(tmp_path, backend):
    task, entity, light, make = CASES[backend]
    usd = in_own_process(asset, make, tmp_path)
    env = {
        "backend": backend,
        "task": task,
        "num_envs": ROWS,
        "max_episode_steps": LIMIT,
        "env_kwargs": {"env_cfg": {"override": overrides(entity, light, usd)}},
    }
    got = await collect(tmp_path, env)
    assert_same(got, in_own_process(directly, backend, usd, got["action"]))
    _, ended = ended_of(got["terminated"], got["truncated"])
    assert ended.sum() >= ROWS


def asked_by_runners(override):
    from rlightning.env.isaac_env import IsaacManagerBasedRLEnv
    from rlightning.errors import ConfigError, ResetNeededError
    from rlightning.types import PolicyResponse
    from rlightning.utils.config import EnvConfig

    section = {"name": "i", "backend": "isaac_manager_based", "task": "Isaac-Cartpole"}
    with pytest.raises(ConfigError, match="env.devise: .* did you mean 'device'"):
        IsaacManagerBasedRLEnv(EnvConfig(**section, num_envs=2, devise="cpu"))
    given = EnvConfig(**section, num_envs=2, env_kwargs={"env_cfg": {"override": override}})
    env = IsaacManagerBasedRLEnv(given)
    assert env.num_actions == 1
    with pytest.raises(ResetNeededError):
        env.get_observations()
    first = env._reset()
    assert np.array_equal(env.get_observations(), first.observation)
    after = env._step(PolicyResponse(env.env_id, action=np.ones((2, 1), np.float32)))
    assert np.array_equal(env.get_observations(), after.observation)
    assert not np.array_equal(after.observation, first.observation)
    env.close()


def test_what_runners_ask_beside_the_metadata(tmp_path):
    _, entity, light, make = CASES["isaac_manager_based"]
    usd = in_own_process(asset, make, tmp_path)
    in_own_process(asked_by_runners, overrides(entity, light, usd))
