"""Functions that the server's configuration names, over real sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer.utils.postprocess import n_step_postprocess_fn
from rlightning.buffer.utils.utils import default_env_ret_preprocess_fn, default_preprocess_fn
from rlightning.errors import ConfigError, InvalidRequestError
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.utils.config.buffer import FunctionsConfig
from tests.integration.buffer.harness import (
    act,
    asking,
    buffer_server,
    config,
    inserting,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv

HERE = __name__
REPLAY: dict[str, Any] = {"type": "ReplayBuffer", "auto_truncate_episode": True, "capacity": 100}
NOT_A_FUNCTION = 3

three_steps = n_step_postprocess_fn(3, 1.0)


def halved(observation: Any) -> Any:
    return (observation / 2).astype(np.float16)


def clipped(reward: Any) -> Any:
    return np.minimum(reward, 4.0)


def renamed(data: Any, env_ret: Any, observe: Any, score: Any) -> Any:
    taken_s, within_s = env_ret.corrected_latency()  # since it was sent to the server
    assert (0 <= taken_s < 60, within_s) == (True, 0.0)  # one machine, one clock
    return default_env_ret_preprocess_fn(data, env_ret, observe, score)


def only_action(data: Any, response: Any) -> Any:
    return {**data, "action": response.action}


def whole(*arguments: Any) -> Any:
    return default_preprocess_fn(*arguments)


def failing(observation: Any) -> Any:
    if np.any(observation[..., 2] == 2):
        raise RuntimeError("a sensor is broken")
    return observation


def without_the_last_row(observation: Any) -> Any:
    return observation[:-1]


def env(rows: int = 1) -> ScriptedEnv:
    return ScriptedEnv(rows, lambda row, episode: (5, True))


async def columns_with(**functions: str) -> dict[str, Any]:
    one = env()
    named = {key: f"{HERE}:{name}" for key, name in functions.items()}
    async with (
        buffer_server(**REPLAY, functions=named) as buffers,
        inserting(buffers.address, one.meta) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, one, 5)
        await client.flush(5)
        columns: dict[str, Any] = await asker.get()
        return columns


async def test_every_documented_function_can_be_named() -> None:
    plain = await columns_with()
    named = await columns_with(obs_preprocessor="halved", reward_preprocessor="clipped")
    assert named["observation"].dtype == np.float16
    np.testing.assert_array_equal(named["observation"], plain["observation"] / 2)
    np.testing.assert_array_equal(named["reward"], np.minimum(plain["reward"], 4))
    assert (await columns_with(env_ret_preprocess_fn="renamed")).keys() == plain.keys()
    alone = await columns_with(policy_resp_preprocess_fn="only_action")
    assert plain.keys() - alone.keys() == {"log_prob", "value"}
    assert (await columns_with(preprocess_fn="whole")).keys() == plain.keys()
    steps = await columns_with(postprocess_fn="three_steps")
    np.testing.assert_array_equal(steps["reward"], [24, 36, 48, 36, 20])
    assert FunctionsConfig.model_fields.keys() == {
        "obs_preprocessor",
        "reward_preprocessor",
        "env_ret_preprocess_fn",
        "policy_resp_preprocess_fn",
        "preprocess_fn",
        "postprocess_fn",
    }


async def test_rollouts_are_made_of_what_the_functions_return() -> None:
    one = env(2)
    named = {"obs_preprocessor": f"{HERE}:halved"}
    async with (
        buffer_server(functions=named, rollout_length=4) as buffers,
        inserting(buffers.address, one.meta) as client,
        sampling(buffers.address) as learner,
    ):
        await act(client, one, 4)
        columns = (await learner.next_batch(5)).columns
        assert columns["observation"].dtype == np.float16
        np.testing.assert_array_equal(columns["observation"][:, 0, 2], [0, 0.5, 1, 1.5])


async def test_what_a_function_raises_is_told_and_the_session_lives_on() -> None:
    one = env()
    named = {"obs_preprocessor": f"{HERE}:failing"}
    async with (
        buffer_server(**REPLAY, functions=named) as buffers,
        inserting(buffers.address, one.meta) as client,
    ):
        message = r"env 'env': a function of buffer\.functions raised RuntimeError: a sensor is"
        await act(client, one, 2)
        with pytest.raises(InvalidRequestError, match=message):
            await client.flush(5)
        await act(client, one, 1)
        await client.flush(5)
        assert buffers.table.producers.keys() == {"env"}


async def test_a_function_that_loses_rows_is_named_with_what_was_expected() -> None:
    one = env(3)
    message = (
        r"obs_preprocessor: observation: expected a leading axis of 3.*came the shape \[2, 3\]"
    )
    async with (
        buffer_server(functions={"obs_preprocessor": f"{HERE}:without_the_last_row"}) as buffers,
        inserting(buffers.address, one.meta) as client,
    ):
        await act(client, one, 1)
        with pytest.raises(InvalidRequestError, match=message):
            await client.flush(5)


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("preprocess_fn", "nowhere:f", "'nowhere:f' cannot be loaded: ModuleNotFoundError"),
        ("postprocess_fn", f"{HERE}:absent", "cannot be loaded: AttributeError"),
        ("obs_preprocessor", "halved", "expected module:function, got 'halved'"),
        ("reward_preprocessor", f"{HERE}:NOT_A_FUNCTION", "is no function but 3"),
    ],
)
def test_a_function_that_cannot_be_loaded_stops_the_start(
    key: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"buffer\.functions\.{key}: .*{message}"):
        BufferService(config(**REPLAY, functions={key: name}))


def test_rollouts_have_no_postprocess_function() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.functions\.postprocess_fn: rollouts"):
        BufferService(config(functions={"postprocess_fn": f"{HERE}:three_steps"}))
