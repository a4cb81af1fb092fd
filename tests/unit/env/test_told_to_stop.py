"""A client that was told to stop leaves an env that fails alone: Ctrl-C reaches the env's process, too."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.base_env import BaseEnv
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.env.remote_env.link import LockstepLink
from rlightning.env.remote_env.paced_link import PacedLink
from rlightning.errors import EnvError
from rlightning.types import EnvRet, PolicyResponse
from tests.unit.env.envs import config


class Stopped(BaseEnv):
    """Its client is told to stop in its reset, or in its first step, which fails then."""

    def __init__(self, fails_in):
        super().__init__(config())
        self.fails_in, self.called = fails_in, []

    def get_observation_space(self):
        return gym.spaces.Box(-1, 1, (1,))

    def get_action_space(self):
        return gym.spaces.Box(-1, 1, (1,))

    def reset(self, *args, **kwargs):
        return self._call("reset")

    def step(self, policy_resp):
        return self._call("step")

    def _call(self, command):
        self.called.append(command)
        if command == self.fails_in and len(self.called) < 5:
            self.client.stop()
            raise EnvError("the process of an env has ended with code 0")
        return EnvRet(self.env_id, np.zeros(1, np.float32), 0.0, False, False, {})


@pytest.mark.parametrize("control_hz", [None, 1000])
@pytest.mark.parametrize("fails_in", ["reset", "step"])
def test_what_fails_then_is_not_reset(monkeypatch, fails_in, control_hz):
    async def nothing(link, *args):
        pass

    async def act(link, env_ret):
        return PolicyResponse(env_ret.env_id, action=np.zeros((1, 1), np.float32))

    for kind in (LockstepLink, PacedLink):
        monkeypatch.setattr(kind, "start", nothing)
    monkeypatch.setattr(LockstepLink, "ask", act)
    monkeypatch.setattr(PacedLink, "flush", nothing)
    env = Stopped(fails_in)
    pace = {} if control_hz is None else {"control_hz": control_hz, "on_late": "zero"}
    env.client = RemoteEnvClient(env, "127.0.0.1", 1, **pace)
    with env.client as client:
        client.run()
        assert env.called == (["reset"] if fails_in == "reset" else ["reset", "step"])
        assert client.status.env_errors == 0
