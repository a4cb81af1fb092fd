"""Vector envs of each autoreset mode give the same transitions."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlightning.buffer import BufferConfig, ReplayBuffer
from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.hosting import host_envs
from rlightning.env.remote_env.given import as_base_env
from rlightning.errors import ConfigError, EnvError
from rlightning.types import ActionSource
from rlightning.utils.config import Config
from tests.unit.env.envs import Counting, Nested, answer, config

HERE = "tests.unit.env.test_autoreset"
MODES = [mode.value for mode in AutoresetMode]


class Uneven(Counting):
    """Episodes whose lengths differ from row to row; the first ones end at once."""

    def __init__(self, row, short=False):
        super().__init__(100 * row)
        self.episode = -1 if short else row - 1


class Rows(SyncVectorEnv):
    """Three rows in any autoreset mode."""

    def __init__(self, num_envs, mode="SameStep"):
        makers = [lambda row=row: Uneven(row) for row in range(num_envs)]
        super().__init__(makers, autoreset_mode=mode)


class InStep(SyncVectorEnv):
    """Rows that all end in the same step."""

    def __init__(self, num_envs, mode="SameStep"):
        super().__init__([Counting] * num_envs, autoreset_mode=mode)


class NestedRows(SyncVectorEnv):
    """Rows with dicts, tuples and texts."""

    def __init__(self, num_envs, mode="SameStep"):
        super().__init__([Nested] * num_envs, autoreset_mode=mode)


async def transitions(task, mode, steps):
    """What each row has in a buffer after so many steps of the group, as (observation, ...) lists."""
    (group,) = await host_envs(
        [config(f"{HERE}:{task}", num_envs=3, env_kwargs=Config(mode=mode), info_keys=["fresh"])],
        pipeline_depth=1,
    )
    buffer = ReplayBuffer(
        BufferConfig(type="ReplayBuffer", capacity=1000, auto_truncate_episode=True)
    )
    buffer.init([group.meta])
    env_ret = await group.reset()
    total = 0
    for _ in range(steps):
        # Out of bounds where the observation is odd, so that some are clipped.
        action = env_ret.observation[:, 1:] / 4.0 - 1.0 + (env_ret.observation[:, 1:] == 3)
        response = answer(group.env_id, action.astype(np.float32))
        buffer.add_transition(group.env_id, env_ret, response)
        env_ret = await group.step(response)
        total += len(env_ret.last_reward)
    assert group.env_steps == total
    await group.close()
    columns = buffer.get_all()
    rows = {}
    for i in range(len(columns["reward"])):
        observation = columns["observation"][i]
        rows.setdefault(int(observation[0]) // 100, []).append(
            (
                *observation.tolist(),
                *columns["next_observation"][i].tolist(),
                float(columns["action"][i][0]),
                float(columns["reward"][i]),
                bool(columns["terminated"][i]),
                bool(columns["truncated"][i]),
                int(columns["action_source"][i]),
            )
        )
    return {row: sorted(items) for row, items in rows.items()}


@pytest.mark.parametrize("task", ["Rows", "InStep"])
async def test_all_modes_store_the_same_transitions(task):
    same = await transitions(task, "SameStep", 40)
    disabled = await transitions(task, "Disabled", 40)
    late = await transitions(task, "NextStep", 50)
    assert disabled == same
    assert set(late) == set(same)
    for row, items in same.items():
        # Rows that reset in the next step have taken fewer steps by then, or more after 50.
        common = min(len(items), len(late[row]))
        assert common >= 25
        assert late[row][:20] == items[:20]
        ended = [item for item in items if item[6] or item[7]]
        assert ended
        assert all(item[2] == item[0] and item[3] == item[1] + 1 for item in items)


def test_a_row_that_resets_later_is_left_out_until_it_has():
    env = GymnasiumEnv(config(f"{HERE}:Rows", num_envs=3, env_kwargs=Config(mode="NextStep")))
    first = env._reset()
    assert first.rows is None
    actions = np.zeros((3, 1))
    for _ in range(2):
        env_ret = env._step(answer(env.env_id, actions))
    env_ret = env._step(answer(env.env_id, actions))
    assert env_ret.rows.tolist() == [1, 2]  # row 0 ends its first episode in its third step
    assert "final_rows" not in env_ret.info
    assert env_ret.observation.tolist() == [[101, 3], [202, 3]]
    with pytest.raises(EnvError, match=r"expected float32\[2, 1\]"):
        env._step(answer(env.env_id, actions))
    env_ret = env._step(answer(env.env_id, np.full((2, 1), 3.0)))
    assert env_ret.rows.tolist() == [0, 2]  # row 1 has ended in its fourth
    assert env_ret.info["final_rows"].tolist() == [0]
    assert env_ret.info["final_observation"].tolist() == [[0, 3]]
    assert env_ret.observation.tolist() == [[1, 0], [202, 4]]
    assert env_ret.last_reward.tolist() == [3.0, 5.0]
    assert env_ret.last_terminated.tolist() == [True, False]
    assert env_ret.executed_action.tolist() == [[0.0], [1.0]]
    assert env_ret.action_source.tolist() == [ActionSource.POLICY, ActionSource.CLIPPED]
    assert env_ret.info["episode_info"]["episode_len"].tolist() == [3]
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_observations_of_any_kind(mode):
    env = GymnasiumEnv(config(f"{HERE}:NestedRows", num_envs=2, env_kwargs=Config(mode=mode)))
    env._reset()
    action = {"grip": np.array([0, 1]), "move": np.zeros((2, 2))}
    env._step(answer(env.env_id, action))
    env_ret = env._step(answer(env.env_id, action))
    assert env_ret.info["final_rows"].tolist() == [0, 1]
    assert env_ret.info["final_observation"]["task"] == ("step 2", "step 2")
    assert env_ret.observation["task"] == ("step 0", "step 0")
    assert env_ret.info["final_observation"]["pose"][1].tolist() == [2, 2]
    env.close()


def test_a_vector_env_that_does_not_say_when_it_resets():
    with pytest.raises(ConfigError, match="autoreset_mode None, expected one of NEXT_STEP"):
        GymnasiumEnv(config(f"{HERE}:Unsaid", num_envs=3))


class Unsaid(Rows):
    """Has metadata of its own."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.metadata = {}


def test_given_vector_envs():
    env = as_base_env(Rows(3, "Disabled"))
    env._reset()
    for _ in range(3):
        env_ret = env._step(answer(env.env_id, np.zeros((3, 1))))
    assert env_ret.info["final_rows"].tolist() == [0]
    env = as_base_env(Rows(3, "NextStep"))
    env_ret = env._reset()
    rows = []
    for _ in range(4):
        count = len(env_ret.observation)
        env_ret = env._step(answer(env.env_id, np.zeros((count, 1))))
        rows.append(None if env_ret.rows is None else env_ret.rows.tolist())
    assert any(some is not None and len(some) < 3 for some in rows), rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ERROR")  # gymnasium's way to log
def test_rows_in_processes_of_their_own():
    task = "tests.unit.env.envs:SometimesBreaking"
    seen = {}
    for mode in ("sync", "async"):
        env = GymnasiumEnv(config(task, num_envs=2, seed=3, vectorization_mode=mode))
        env_rets = [env._reset()]
        zeros = np.zeros((2, 1))
        env_rets += [env._step(answer(env.env_id, zeros)) for _ in range(8)]
        seen[mode] = [(one.observation.tolist(), one.last_reward.tolist()) for one in env_rets]
    assert isinstance(env.env, AsyncVectorEnv)
    assert seen["sync"] == seen["async"]
    with pytest.raises(RuntimeError, match="the arm fell off"):
        [env._step(answer(env.env_id, zeros)) for _ in range(40)]
    assert env._reset().observation.tolist() == [[0, 0], [0, 0]]  # in new processes
    env._step(answer(env.env_id, zeros))
    env.close()


class Fragile(Counting):
    """Ends its process without a word at an action of 1, and raises in a reset with options."""

    def reset(self, *, seed=None, options=None):
        if options:
            raise RuntimeError("the arm fell off")
        return super().reset(seed=seed)

    def step(self, action):
        if action[0] == 1.0:
            os._exit(3)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ERROR")  # gymnasium's way to log
def test_rows_whose_process_has_ended_are_made_anew_as_they_were():
    evaluate_cfg = Config(env_kwargs={"offset": 100})
    env = GymnasiumEnv(
        config(f"{HERE}:Fragile", num_envs=2, vectorization_mode="async", evaluate_cfg=evaluate_cfg)
    )
    env.apply_evaluate_cfg()
    env._reset()
    with pytest.raises(EnvError, match="the process of a row has ended"):
        env._step(answer(env.env_id, np.array([[1.0], [0.0]])))
    assert env.env.parent_pipes[1].poll(30)  # the other row has stepped, and nobody has heard of it
    assert env._reset().observation.tolist() == [[100, 0], [100, 0]]
    env.restore_evaluate_cfg()
    env._reset()
    with pytest.raises(RuntimeError, match="the arm fell off"):
        env._reset(options={"fall": True})
    assert env._reset().observation.tolist() == [[0, 0], [0, 0]]
    with pytest.raises(EnvError, match="the process of a row has ended"):
        env._step(answer(env.env_id, np.array([[0.0], [1.0]])))
    processes = env.env.processes
    env.close()
    assert not any(process.is_alive() for process in processes)


class Simulated(Counting):
    """Has lost its simulator at an action of 1; leaves a file when it is closed."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def step(self, action):
        if action[0] == 1.0:
            raise ConnectionRefusedError("no simulator")
        return super().step(action)

    def close(self):
        Path(self.folder, str(os.getpid())).touch()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ERROR")  # gymnasium's way to log
def test_rows_beside_one_that_raised_are_closed_in_order(tmp_path):
    kwargs = Config(folder=str(tmp_path))
    env = GymnasiumEnv(
        config(f"{HERE}:Simulated", num_envs=2, vectorization_mode="async", env_kwargs=kwargs)
    )
    env._reset()
    with pytest.raises(EnvError, match="has ended .ConnectionRefusedError: no simulator"):
        env._step(answer(env.env_id, np.array([[1.0], [0.0]])))
    env.close()
    assert len(list(tmp_path.iterdir())) == 1 + 2  # gymnasium makes one more, to ask it


@pytest.mark.slow
def test_rows_are_closed_whose_process_has_ended_between_two_steps():
    env = GymnasiumEnv(config(f"{HERE}:Fragile", num_envs=2, vectorization_mode="async"))
    processes = env.env.processes
    processes[0].kill()
    processes[0].join()
    env.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.slow
def test_an_observation_of_no_fixed_shape_from_another_process():
    env = GymnasiumEnv(config(f"{HERE}:Listing", num_envs=2, vectorization_mode="async"))
    assert env._reset().observation == ((1.0, 2.0), (1.0, 2.0))
    env.close()


class Listing(Counting):
    """Observes a sequence."""

    observation_space = gym.spaces.Sequence(gym.spaces.Box(0, 9, (), np.float32))

    def _observation(self):
        return (1.0, 2.0)
