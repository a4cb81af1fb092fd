from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer import BufferConfig, RolloutBuffer
from rlightning.buffer.pipeline import Item
from rlightning.errors import InvalidRowError
from rlightning.types import (
    ActionSource,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from tests.unit.buffer.scripted import (
    ScriptedEnv,
    answer,
    check_transitions,
    meta,
)


def collecting(spec: EnvMeta | None = None, **config: Any) -> RolloutBuffer:
    """A buffer that keeps every transition: `get_all` gives them row after row."""
    settings = {"rollout_length": 100, "max_rollouts": 1, **config}
    buffer = RolloutBuffer(BufferConfig(type="RolloutBuffer", capacity=1000, **settings))
    buffer.init()
    buffer.open_group(spec or meta())
    return buffer


def insert(buffer: RolloutBuffer, env_ret: EnvRet, response: Any = None, **flags: Any) -> None:
    buffer.commit(buffer.prepare(env_ret.env_id, [Item(env_ret, response, **flags)]))


def run(buffer: RolloutBuffer, env: ScriptedEnv, steps: int) -> None:
    env_ret = env.reset()
    for _ in range(steps):
        insert(buffer, env_ret, answer(env_ret))
        env_ret = env.step()
    insert(buffer, env_ret, answer(env_ret))


def test_reward_and_flags_belong_to_the_step_before() -> None:
    buffer = collecting()
    run(buffer, ScriptedEnv(2), 3)
    columns = buffer.get_all()
    assert check_transitions(columns) == 6
    np.testing.assert_array_equal(columns["step"], [0, 1, 2, 0, 1, 2])
    np.testing.assert_array_equal(columns["reward"], [4, 8, 12, 4.25, 8.25, 12.25])
    assert not columns["cut"].any()
    assert set(columns["action_source"]) == {ActionSource.POLICY}


@pytest.mark.parametrize("terminates", [True, False])
def test_a_row_that_ends_keeps_the_last_observation_of_its_own_episode(terminates: bool) -> None:
    buffer = collecting()
    run(buffer, ScriptedEnv(2, lambda row, episode: (2 + row, terminates)), 6)
    columns = buffer.get_all()
    assert check_transitions(columns) == 12
    ends = columns["terminated"] if terminates else columns["truncated"]
    others = columns["truncated"] if terminates else columns["terminated"]
    np.testing.assert_array_equal(ends, [0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1])
    assert not others.any()
    assert not columns["cut"].any()


def test_reset_steps_of_a_next_step_env_are_not_transitions() -> None:
    """The last observation comes alone, and the reset after it ignores the action."""
    buffer = collecting(meta(1))

    def send(episode: int, step: int, *, done: bool = False) -> None:
        observation = np.array([[0, episode, step]], np.float32)
        reward = np.array([0.0 if step == 0 else 4.0 * step])
        flags = np.array([done])
        env_ret = EnvRet("env", observation, reward, flags, np.array([False]))
        insert(buffer, env_ret, answer(env_ret))

    for episode in range(2):
        for step in range(3):
            send(episode, step, done=step == 2)
    send(2, 0)
    columns = buffer.get_all()
    assert check_transitions(columns) == 4
    np.testing.assert_array_equal(columns["terminated"], [0, 1, 0, 1])


def test_a_lone_env_without_counters_is_counted() -> None:
    buffer = collecting(EnvMeta("env"))
    for step in range(4):
        env_ret = EnvRet("env", np.array([0, 0, step], np.float32), 4.0 * step, step == 3)
        insert(buffer, env_ret, answer(env_ret))
    env_ret = EnvRet("env", np.array([0, 1, 0], np.float32))
    insert(buffer, env_ret, answer(env_ret))
    env_ret = EnvRet("env", np.array([0, 1, 1], np.float32), 4.0, False, True)
    insert(buffer, env_ret)
    columns = buffer.get_all()
    assert check_transitions(columns) == 4
    np.testing.assert_array_equal(columns["terminated"], [0, 0, 1, 0])
    np.testing.assert_array_equal(columns["truncated"], [0, 0, 0, 1])


def test_a_new_segment_is_not_joined_to_older_rows() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    run(buffer, env, 2)
    env_ret = env.step()
    insert(buffer, env_ret, answer(env_ret), new_segment=True)
    env_ret = env.step()
    insert(buffer, env_ret, answer(env_ret))
    columns = buffer.get_all()
    assert check_transitions(columns) == 6
    np.testing.assert_array_equal(columns["step"], [0, 1, 3, 0, 1, 3])
    np.testing.assert_array_equal(columns["cut"], [0, 1, 0, 0, 1, 0])
    assert (buffer.counters.lost, buffer.counters.segments) == (2, 1)


def test_a_missing_step_is_never_bridged(caplog: pytest.LogCaptureFixture) -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    run(buffer, env, 1)
    env.step()
    for _ in range(2):
        env_ret = env.step()
        insert(buffer, env_ret, answer(env_ret))
    columns = buffer.get_all()
    assert check_transitions(columns) == 4
    np.testing.assert_array_equal(columns["step"], [0, 3, 0, 3])
    np.testing.assert_array_equal(columns["cut"], [1, 0, 1, 0])
    assert "does not follow" in caplog.text


def test_another_episode_is_never_joined() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    run(buffer, env, 1)
    run(buffer, env, 1)
    columns = buffer.get_all()
    assert check_transitions(columns) == 4
    np.testing.assert_array_equal(columns["cut"], [1, 0, 1, 0])


def test_an_unanswered_observation_begins_a_segment() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    run(buffer, env, 1)
    insert(buffer, env.step())
    for _ in range(2):
        env_ret = env.step()
        insert(buffer, env_ret, answer(env_ret))
    columns = buffer.get_all()
    assert check_transitions(columns) == 6
    np.testing.assert_array_equal(columns["step"], [0, 1, 3, 0, 1, 3])
    np.testing.assert_array_equal(columns["cut"], [0, 1, 0, 0, 1, 0])


def test_rows_may_come_on_their_own() -> None:
    buffer = collecting(meta(3))
    env = ScriptedEnv(3, lambda row, episode: (2, True))
    slow = ScriptedEnv(3, lambda row, episode: (2, True))
    for source, rows, steps in ((env, [0, 2], 3), (slow, [1], 2)):
        env_ret = source.reset()
        for _ in range(steps + 1):
            part = subset(env_ret, rows)
            insert(buffer, part, answer(part))
            env_ret = source.step()
    columns = buffer.get_all()
    assert check_transitions(columns) == 8
    np.testing.assert_array_equal(columns["observation"][:, 0], [0, 0, 0, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(columns["terminated"], [0, 1, 0, 0, 1, 0, 1, 0])


def subset(env_ret: EnvRet, rows: list[int]) -> EnvRet:
    info: dict[str, Any] = {}
    if env_ret.info:
        positions = [
            (rows.index(row), k) for k, row in enumerate(env_ret.info["final_rows"]) if row in rows
        ]
        if positions:
            info["final_rows"] = np.array([p for p, _ in positions], np.int32)
            info["final_observation"] = env_ret.info["final_observation"][[k for _, k in positions]]
    assert env_ret.episode_id is not None
    assert env_ret.step is not None
    return EnvRet(
        env_ret.env_id,
        env_ret.observation[rows],
        env_ret.last_reward[rows],
        env_ret.last_terminated[rows],
        env_ret.last_truncated[rows],
        info,
        episode_id=env_ret.episode_id[rows],
        step=env_ret.step[rows],
        rows=np.array(rows, np.int32),
    )


def test_cut_rows_end_without_a_flag_of_the_env() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    run(buffer, env, 1)
    env_ret = env.step()
    insert(buffer, env_ret, answer(env_ret), cut_rows=[1])
    env_ret = env.step()
    insert(buffer, env_ret, answer(env_ret))
    columns = buffer.get_all()
    assert check_transitions(columns) == 5
    np.testing.assert_array_equal(columns["step"], [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(columns["cut"], [0, 0, 0, 0, 1])
    assert not columns["truncated"].any()


def test_the_executed_action_is_stored_with_the_policys_own_beside_it() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    run(buffer, env, 1)
    env_ret = env.step()
    env_ret.executed_action = np.array([7, 8])
    env_ret.action_source = np.array([ActionSource.HUMAN, ActionSource.POLICY], np.int8)
    insert(buffer, env_ret, answer(env_ret))
    env_ret = env.step()
    env_ret.action_source = int(ActionSource.HOLD)
    insert(buffer, env_ret, answer(env_ret))
    columns = buffer.get_all()
    assert check_transitions(columns) == 6
    own = columns["policy_action"]
    np.testing.assert_array_equal(columns["action"], [own[0], 7, own[2], own[3], 8, own[5]])
    assert columns["action_source"].dtype == np.int8
    np.testing.assert_array_equal(columns["action_source"], [1, 2, 3, 1, 1, 3])


@pytest.mark.parametrize(
    ("executed", "said"),
    [
        (np.array([0.5, 1.5]), r"executed_action: expected int64 \[\], got float64 \[\], as the"),
        (
            np.ones((2, 3), np.int64),
            r"executed_action: expected int64 \[\], got int64 \[3\], as the",
        ),
        ({"arm": np.ones(2, np.int64)}, r"executed_action\.arm: expected int64 \[\]"),
    ],
)
def test_the_first_executed_action_has_to_be_of_the_action_space(executed: Any, said: str) -> None:
    buffer, env = collecting(), ScriptedEnv(2)
    run(buffer, env, 1)
    env_ret = env.step()
    env_ret.executed_action = executed
    with pytest.raises(InvalidRowError, match=said):
        insert(buffer, env_ret)
    env_ret.executed_action = np.array([7, 8])
    insert(buffer, env_ret)


def test_an_executed_action_may_look_otherwise_than_the_policys_chunk() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    env_ret = env.reset()
    for _ in range(3):
        response = answer(env_ret)
        response.action = np.repeat(response.action[:, None], 5, axis=1)
        insert(buffer, env_ret, response)
        env_ret = env.step()
        env_ret.executed_action = np.ones(2, np.int64)
    insert(buffer, env_ret)
    columns = buffer.get_all()
    assert columns["action"].shape == (6,)
    assert columns["policy_action"].shape == (6, 5)
    env_ret = env.step()
    insert(buffer, env_ret, response)
    insert(buffer, env.step())  # no executed action, so what was executed is not known
    assert len(buffer.get_all()["action"]) == 6


def test_versions_are_those_of_the_answers() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    env_ret = env.reset()
    for version in (3, 4, 5):
        insert(buffer, env_ret, answer(env_ret, version))
        env_ret = env.step()
    np.testing.assert_array_equal(buffer.get_all()["policy_version"], [3, 4, 3, 4])


def test_nested_observations_keep_their_structure() -> None:
    space = gym.spaces.Dict(
        camera=gym.spaces.Box(0, 255, (4, 4), np.uint8),
        arm=gym.spaces.Tuple((gym.spaces.Discrete(9), gym.spaces.Box(-1, 1, (2,), np.float32))),
    )
    buffer = collecting(meta(2, observation=space))

    def observation(step: int, rows: int) -> dict[str, Any]:
        return {
            "camera": np.full((rows, 4, 4), step, np.uint8),
            "arm": (np.full(rows, step), np.full((rows, 2), step, np.float32)),
        }

    for step in range(3):
        flags = np.array([False, step == 2])
        env_ret = EnvRet("env", observation(step, 2), np.zeros(2), flags, np.zeros(2, bool))
        if step == 2:
            env_ret.info = {"final_rows": [1], "final_observation": observation(77, 1)}
        insert(buffer, env_ret, PolicyResponse("env", action={"hand": np.full((2, 1), step)}))
    columns = buffer.get_all()
    assert columns["observation"]["camera"].shape == (4, 4, 4)
    assert columns["observation"]["camera"].dtype == np.uint8
    np.testing.assert_array_equal(columns["observation"]["arm"][0], [0, 1, 0, 1])
    np.testing.assert_array_equal(columns["next_observation"]["arm"][1][:, 0], [1, 2, 1, 77])
    np.testing.assert_array_equal(columns["next_observation"]["camera"][:, 0, 0], [1, 2, 1, 77])
    np.testing.assert_array_equal(columns["action"]["hand"][:, 0], [0, 1, 0, 1])


def test_rewards_and_flags_by_agent_stay_apart() -> None:
    buffer = collecting(EnvMeta("env"))
    space = gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Discrete(3))
    observation = {"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}
    response = MultiAgentPolicyResponse.make_example(space, "env")
    insert(buffer, MultiAgentEnvRet("env", observation), response)
    for done in (False, True):
        insert(
            buffer,
            MultiAgentEnvRet(
                "env", observation, {"a": 1.0, "b": 2.0}, {"a": True, "b": done}, {"a": 0, "b": 0}
            ),
            response,
        )
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["reward"]["b"], [2, 2])
    np.testing.assert_array_equal(columns["terminated"]["a"], [1, 1])
    np.testing.assert_array_equal(columns["terminated"]["b"], [0, 1])


def test_extra_fields_are_stored_with_the_observation_they_came_with() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    env_ret = env.reset()
    for step in range(3):
        env_ret._extra = {"goal": np.full((2, 1), step)}
        insert(buffer, env_ret, answer(env_ret))
        env_ret = env.step()
    np.testing.assert_array_equal(buffer.get_all()["goal"][:, 0], [0, 1, 0, 1])


def test_extra_fields_of_the_step_before_are_stored_with_that_step_too() -> None:
    buffer = collecting()
    env = ScriptedEnv(2, lambda row, episode: (2 + row, True))
    env_ret = env.reset()
    for step in range(7):
        env_ret._extra = {"last_time": np.full(2, step)}
        insert(buffer, env_ret, answer(env_ret))
        env_ret = env.step()
    columns = buffer.get_all()
    assert check_transitions(columns) == 12
    assert columns["terminated"].sum() == 5  # whose own time it has, not that of a reset
    np.testing.assert_array_equal(columns["time"], [1, 2, 3, 4, 5, 6] * 2)
    np.testing.assert_array_equal(columns["last_time"], [0, 1, 2, 3, 4, 5] * 2)


def test_what_was_added_is_copied_and_not_changed() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    first, second = env.reset(), env.step()
    stamp = first.ts_env_sent_ns
    response = answer(first)
    insert(buffer, first, response)
    insert(buffer, second, answer(second))
    first.observation[:] = -1
    response.action[:] = -1
    second.last_reward[:] = -1
    assert check_transitions(buffer.get_all()) == 2
    assert first.ts_env_sent_ns == stamp
    assert first.info == {}


def change(**fields: Any) -> Any:
    def apply(env_ret: EnvRet, response: PolicyResponse) -> None:
        for name, value in fields.items():
            setattr(
                response if name.startswith("policy_") else env_ret,
                name.removeprefix("policy_"),
                value,
            )

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(observation=np.zeros((2, 3))), "observation: expected float32, got float64"),
        (
            change(observation=np.zeros((2, 4), np.float32)),
            r"expected shape \[2, 3\], got \[2, 4\]",
        ),
        (change(observation=np.zeros((3, 3), np.float32)), r"observation: expected shape \[2, 3\]"),
        (change(observation={"a": 1}), "observation: expected an array"),
        (change(last_reward=np.zeros(3)), r"last_reward: expected shape \[2\]"),
        (change(last_reward="much"), "last_reward: expected an array of numbers, got str"),
        (change(last_terminated=np.zeros(2)), "last_terminated: expected booleans"),
        (change(info={"final_rows": [0]}), "final_observation: missing"),
        (change(info={"final_rows": [2]}), "final_rows: expected ascending numbers below 2"),
        (change(step=np.zeros(1, np.int64)), "step: expected 2 integers"),
        (change(rows=np.array([1, 0])), "rows: expected ascending"),
        (change(rows=np.array([0, 5])), "rows: expected ascending"),
        (change(action_source=np.array([9, 1])), "action_source: unknown source"),
        (change(_extra={"goal": np.zeros(2)}), "extra fields: goal not expected"),
        (change(policy_action=np.zeros(2, np.float32)), "action: expected int64, got float32"),
        (change(policy_value=np.zeros((2, 1), np.float32)), r"value: expected shape \[2\]"),
        (change(policy_extra=np.zeros(2)), "policy outputs: extra not expected"),
        (change(policy_reward=np.zeros(2)), "reward: the transition has a field of this name"),
        (change(policy_last_reward=np.zeros(2)), "last_reward: the transition has a field"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_field_and_changes_nothing(
    spoil: Any, message: str
) -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    run(buffer, env, 1)
    env_ret = env.step()
    bad, response = env_ret.__class__(**env_ret.__dict__), answer(env_ret)
    spoil(bad, response)
    with pytest.raises(InvalidRowError, match=message):
        insert(buffer, bad, response)
    insert(buffer, env_ret, answer(env_ret))
    assert check_transitions(buffer.get_all()) == 4


def test_items_of_one_message_are_checked_together() -> None:
    buffer = collecting()
    env = ScriptedEnv(2)
    first, second = env.reset(), env.step()
    bad = answer(second)
    bad.value = np.zeros(7, np.float32)
    with pytest.raises(InvalidRowError, match="value"):
        buffer.prepare("env", [Item(first, answer(first)), Item(second, bad)])
    buffer.commit(buffer.prepare("env", [Item(first, answer(first)), Item(second, answer(second))]))
    assert check_transitions(buffer.get_all()) == 2


def test_what_is_neither_number_nor_text_is_refused_by_name() -> None:
    buffer = collecting(EnvMeta("env"))
    with pytest.raises(InvalidRowError, match=r"observation\.task: expected an array of numbers"):
        insert(buffer, EnvRet("env", {"task": b"lift"}), PolicyResponse("env", action=1))
