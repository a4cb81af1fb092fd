"""An env of one's own, whole, in another process: what is known of it here, and what a new process gets."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.base_env import BaseEnv
from rlightning.env.utils.backends import make_base_env
from rlightning.errors import EnvError
from rlightning.types import EnvRet
from tests.unit.env.envs import answer, config

pytestmark = pytest.mark.slow


class Late(BaseEnv):
    """Has spaces and a limit from `init` on, which fails while a file is there; 1 ends its process."""

    spaces = mode = None

    def init(self):
        if Path(self.config.task).exists():
            raise RuntimeError("no licence")
        self.spaces = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
        self.max_episode_steps = 7
        self.mode = 0.0
        return self.get_metadata()

    def get_observation_space(self):
        return self.spaces[0]

    def get_action_space(self):
        return self.spaces[1]

    def reset(self, *args, **kwargs):
        self.steps = 0
        return EnvRet(self.env_id, np.full(1, self.mode, np.float32), 0.0, False, False, {})

    def step(self, policy_resp):
        self.steps += 1
        if policy_resp.action == 1:
            os._exit(3)
        return EnvRet(self.env_id, np.zeros(1, np.float32), 0.0, False, False, {})

    def is_finish(self):
        return self.steps == 2

    def apply_evaluate_cfg(self):
        self.mode = 1.0

    def restore_evaluate_cfg(self):
        self.mode = 0.0


class Vectorising(Late):
    """Heeds `vectorization_mode` by itself."""

    vectorises = True


def test_what_vectorises_by_itself_is_made_here_in_every_mode() -> None:
    for mode in ("async", "independent", "vector_entry_point"):
        section = config(backend=f"{__name__}:Vectorising", num_envs=2, vectorization_mode=mode)
        env = make_base_env(section)
        assert type(env) is Vectorising
        assert env.config.vectorization_mode == mode


def test_a_new_process_is_brought_as_far_as_the_one_before(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    section = config(str(missing), backend=f"{__name__}:Late", vectorization_mode="async")
    env = make_base_env(section)
    others = set(multiprocessing.active_children()) - {env._worker._process}  # type: ignore[attr-defined]
    try:
        env.env_id = "mine"
        meta = env.init()
        assert (meta.env_id, meta.action_space) == ("mine", gym.spaces.Discrete(2))
        assert env.get_observation_space() == gym.spaces.Box(-1, 1, (1,))
        assert env.get_max_episode_steps() == 7
        env.apply_evaluate_cfg()
        assert env._reset().observation == 1
        assert not env.is_finish()
        env._step(answer("mine", 0))
        assert not env.is_finish()
        env._step(answer("mine", 0))
        assert env.is_finish()
        with pytest.raises(EnvError, match="ended with code 3"):
            env._step(answer("mine", 1))
        assert env.is_finish()  # asks no process: who steps it would not expect an error there
        missing.touch()
        with pytest.raises(EnvError, match="no licence"):
            env._reset()
        assert set(multiprocessing.active_children()) <= others
        missing.unlink()
        assert env._reset().observation == 1
        assert not env.is_finish()
        env.restore_evaluate_cfg()
        assert env._reset().observation == 0
    finally:
        env.close()
    with pytest.raises(EnvError, match="closed"):
        env.reset()
