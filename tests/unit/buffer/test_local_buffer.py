from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlightning.buffer.local_buffer import LocalBuffer
from rlightning.errors import ConfigError, DeadlineExceededError, InvalidRowError, ReplayError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import BufferConfig
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_order, check_transitions


def local(**config: object) -> LocalBuffer:
    settings = {"type": "RolloutBuffer", "capacity": 100, "rollout_length": 4, **config}
    return LocalBuffer(BufferConfig(**settings))


async def act(writer: object, env: ScriptedEnv, steps: int) -> None:
    env_ret = env.reset()
    for _ in range(steps):
        await writer.insert(env_ret, answer(env_ret))  # type: ignore[attr-defined]
        env_ret = env.step()


async def test_inserts_wait_until_the_learner_asks_for_the_next_batch() -> None:
    buffer, env = local(), ScriptedEnv(2)
    acting = asyncio.create_task(act(buffer.writer(env.meta), env, 200))
    for rollout in range(20):
        batch = await buffer.next_batch(5)
        assert batch.batch_id == rollout + 1
        assert batch.metadata == {"env_ids": ["env"], "rows": [2], "rollout": rollout}
        assert check_transitions(batch.columns) == 8
        check_order(batch.columns)
        await asyncio.sleep(0)
        assert buffer.table.buffer.counters.completed <= (rollout + 2) * 8
        assert buffer.table.producers["env"].waiting == 1
    acting.cancel()


async def test_a_batch_that_does_not_come_is_a_timeout() -> None:
    buffer = local(producer_timeout_s=100)
    buffer.writer(ScriptedEnv(1).meta)
    with pytest.raises(DeadlineExceededError, match=r"no batch in table 'default' within 0\.01 s"):
        await buffer.next_batch(0.01)


async def test_samples_wait_until_there_is_enough() -> None:
    buffer = local(type="ReplayBuffer", auto_truncate_episode=True)
    env = ScriptedEnv(2, lambda row, episode: (3, True))
    waiting = asyncio.create_task(buffer.next_batch(5, batch_size=20))
    await act(buffer.writer(env.meta), env, 8)
    await asyncio.sleep(0)
    assert not waiting.done()
    await act(buffer.writer(env.meta), env, 9)
    assert check_transitions((await waiting).columns) == 20


async def test_a_refused_item_breaks_the_segment() -> None:
    buffer, env = local(), ScriptedEnv(1)
    writer = buffer.writer(env.meta)
    await act(writer, env, 2)
    bad = env.step()
    bad.observation = bad.observation[:, :1]
    with pytest.raises(InvalidRowError, match="observation"):
        await writer.insert(bad, None)
    env_ret = env.step()
    await writer.insert(env_ret, answer(env_ret))
    await writer.insert(env.step(), None)
    columns = buffer.table.buffer.get_all()
    assert check_transitions(columns) == 2
    assert columns["cut"].tolist() == [True, False]


async def test_a_closed_writer_is_over() -> None:
    buffer, env = local(), ScriptedEnv(1)
    first = buffer.writer(env.meta)
    second = buffer.writer(env.meta)
    first.close()
    await act(second, env, 1)
    with pytest.raises(ReplayError, match="closed"):
        await first.insert(env.step(), None)
    second.close()
    assert not buffer.table.producers
    with pytest.raises(ConfigError, match="id of its env"):
        buffer.writer(EnvMeta())


async def test_an_answer_of_another_env_breaks_the_segment_too() -> None:
    buffer = local()
    writer = buffer.writer(EnvMeta("env"))
    for step, answered in enumerate(("env", "other", "env", "env")):
        env_ret = EnvRet("env", np.full(3, step, np.float32), float(step))
        inserting = writer.insert(env_ret, PolicyResponse(answered, action=np.int64(step)))
        if answered == "env":
            await inserting
        else:
            with pytest.raises(ValueError, match="Mismatched env_id"):
                await inserting
    assert buffer.table.buffer.get_all()["action"].tolist() == [2]
