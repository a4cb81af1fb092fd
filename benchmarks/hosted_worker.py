"""Steps envs in gymnasium's `AsyncVectorEnv`, or in envpool, with a policy in the same process; jobs as JSON lines."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from benchmarks.harness import answer_jobs

Answer = dict[str, Any]


def make(task: str) -> gym.Env[Any, Any]:
    """Makes one env, Atari preprocessed as it is usual."""
    if not task.startswith("ALE/"):
        return gym.make(task)
    import ale_py

    gym.register_envs(ale_py)
    env = gym.wrappers.AtariPreprocessing(gym.make(task, frameskip=1))
    return gym.wrappers.FrameStackObservation(env, 4)


def async_vector_env(task: str, rows: int) -> Any:
    """Gymnasium's own: each row in a process, spawned as it is here."""
    return AsyncVectorEnv(
        [partial(make, task)] * rows,
        context="spawn",
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


def envpool(task: str, rows: int) -> Any:
    """All rows in threads of C++."""
    import envpool as library

    return library.make(task.removeprefix("ALE/"), env_type="gymnasium", num_envs=rows)


class Loop:
    """A vector env and the policy that acts in it; observations go from one to the other."""

    def __init__(self, envs: Any, rows: int, policy: Answer) -> None:
        import torch

        from rlightning.policy.builder import build_policy
        from rlightning.types import EnvMeta, EnvRet
        from rlightning.utils.config import PolicyConfig

        torch.set_num_threads(1)
        self._torch, self._env_ret = torch, EnvRet
        self._envs, self._rows = envs, rows
        spaces = (
            getattr(envs, "single_action_space", envs.action_space),
            getattr(envs, "single_observation_space", envs.observation_space),
        )
        self._dtype = spaces[0].dtype
        self._policy = build_policy(PolicyConfig(**policy), "eval")
        self._policy.init_eval(env_meta=EnvMeta("bench", *spaces, rows))
        self._observation = envs.reset()[0]

    def run(self, seconds: float) -> float:
        """Returns env steps per second."""
        steps, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            with self._torch.inference_mode():
                seen = self._torch.from_numpy(np.ascontiguousarray(self._observation))
                action = np.asarray(self._policy.rollout_step(self._env_ret("bench", seen)).action)
            self._observation = self._envs.step(action.astype(self._dtype, copy=False))[0]
            steps += self._rows
        return steps / elapsed


LIBRARIES = {"AsyncVectorEnv": async_vector_env, "envpool": envpool}


def main() -> None:
    """Makes what the first job names, and runs it as often as it is told to."""
    loops: dict[str, Loop] = {}

    async def start(job: Answer) -> Answer:
        envs = LIBRARIES[job["library"]](job["task"], job["rows"])
        loops["it"] = Loop(envs, job["rows"], job["policy"])
        return {}

    async def run(job: Answer) -> Answer:
        return {"per_s": loops["it"].run(job["seconds"])}

    asyncio.run(answer_jobs({"start": start, "run": run}))


if __name__ == "__main__":
    main()
