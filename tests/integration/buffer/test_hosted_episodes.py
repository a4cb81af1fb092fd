"""Real gymnasium envs, hosted and driven by actors, into a buffer server: what is sampled of them."""

from __future__ import annotations

import asyncio
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.actor import ActorControl, run_actor
from rlightning.env.hosting import HostedGroup, host_envs
from rlightning.testing.waiting import assert_eventually
from rlightning.types import EnvRet, Mode, PolicyResponse, Purpose
from rlightning.utils.config import EnvConfig
from tests.integration.buffer.harness import asking, buffer_server, inserting, sampling

TASK = gym.spaces.Text(30, charset="abcdefghijklmnopqrstuvwxyz 0123456789")
TASK.max_bytes = 200  # type: ignore[attr-defined]


class Talking(gym.Env[Any, Any]):
    """Says episode and step in numbers and in words; terminates or is truncated by turns."""

    observation_space = gym.spaces.Dict(place=gym.spaces.Box(0, 10**6, (2,), np.float32), task=TASK)
    action_space = gym.spaces.Discrete(1000)

    def __init__(self, **kwargs: Any) -> None:
        self.episode = -1
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over = self.steps == 2 + self.episode % 3
        return self._observation(), float(self.steps), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}  # fmt: skip

    def _observation(self) -> dict[str, Any]:
        place = np.array([self.episode, self.steps], np.float32)
        return {"place": place, "task": f"episode {self.episode} step {self.steps}"}


class Policy:
    """Answers with the number of the step; a `PolicyPort`."""

    def __init__(self, env_id: str) -> None:
        self._env_id = env_id

    async def act(
        self, env_ret: EnvRet, *, mode: Mode, purpose: Purpose, reset_state: bool = False
    ) -> PolicyResponse:
        action = env_ret.observation["place"][:, 1].astype(np.int64)
        return PolicyResponse(self._env_id, action=action, said=[*env_ret.observation["task"]])


def check(columns: dict[str, Any]) -> int:
    """Asserts that every transition is one step of one episode, in numbers and in words."""
    before, after = columns["observation"], columns["next_observation"]
    np.testing.assert_array_equal(after["place"][..., 0], before["place"][..., 0])
    np.testing.assert_array_equal(after["place"][..., 1], before["place"][..., 1] + 1)
    np.testing.assert_array_equal(columns["reward"], after["place"][..., 1])
    np.testing.assert_array_equal(columns["action"], before["place"][..., 1])
    episode, step = (after["place"][..., i].reshape(-1).astype(int) for i in range(2))
    over = step == 2 + episode % 3
    np.testing.assert_array_equal(columns["terminated"].reshape(-1), over & (episode % 2 == 0))
    np.testing.assert_array_equal(columns["truncated"].reshape(-1), over & (episode % 2 == 1))
    for observation in (before, after):
        said = [
            f"episode {int(e)} step {int(s)}"
            for e, s in observation["place"].reshape(-1, 2).tolist()
        ]
        assert observation["task"].reshape(-1).tolist() == said
    assert columns["said"].tolist() == before["task"].tolist()
    return len(episode)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("sampler", ["uniform", "sequence"])
async def test_no_transition_crosses_an_episode(num_envs: int, sampler: str) -> None:
    """One env that leaves its reset to the host, and three that reset in the step that ends them."""
    chosen = {"type": sampler, "length": 2} if sampler == "sequence" else {"type": sampler}
    config = EnvConfig(
        name="talking", backend="gymnasium", task=f"{__name__}:Talking", num_envs=num_envs
    )
    async with buffer_server(
        type="ReplayBuffer", capacity=200, auto_truncate_episode=True, sampler=chosen
    ) as buffers:
        groups: list[HostedGroup] = await host_envs([config], pipeline_depth=1)
        (group,) = groups
        control = ActorControl()
        async with inserting(buffers.address, group.meta) as client:
            actor = asyncio.create_task(
                run_actor(group, Policy(group.env_id), client, control=control)
            )
            try:
                await assert_eventually(lambda: buffers.table.buffer.size() >= 150, timeout_s=30)
                async with sampling(buffers.address, batch_size=64) as learner:
                    for _ in range(5):
                        batch = await learner.next_batch(10)
                        assert check(batch.columns) == (128 if sampler == "sequence" else 64)
            finally:
                control.stop()
                await actor
            await client.flush(10)
        await group.close()
        async with asking(buffers.address) as reader:
            rows = await reader.get()
            assert check(rows) >= 150
            assert rows["observation"]["task"].dtype == object
            ended = rows["terminated"] | rows["truncated"]
            assert rows["terminated"].any()
            assert rows["truncated"].any()
            assert not ended.all()
