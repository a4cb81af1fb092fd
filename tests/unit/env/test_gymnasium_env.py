"""Gymnasium envs: the same transitions as the single env, actions that fit, errors that say what is wrong."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.utils.actions import ActionFitter
from rlightning.env.utils.cartpole import SameStepCartPole
from rlightning.errors import ConfigError, EnvError, ObservationError, ResetNeededError
from rlightning.types import ActionSource
from rlightning.utils.config import Config
from tests.unit.env.envs import answer, config

ENVS = "tests.unit.env.envs"


def finals_of(env_ret):
    """Returns the final observations of an EnvRet by row."""
    rows = env_ret.info.get("final_rows", np.zeros(0, np.int32)).tolist()
    return dict(zip(rows, env_ret.info.get("final_observation", []), strict=True))


def rollout(env, actions):
    """Steps a group; returns for each row its transitions (obs, action, reward, flags, next)."""
    env_ret = env._reset()
    rows = env.num_envs
    transitions = [[] for _ in range(rows)]
    for action in actions:
        following = env._step(answer(env.env_id, action))
        ends = following.last_terminated | following.last_truncated
        finals = finals_of(following)
        assert sorted(finals) == np.flatnonzero(ends).tolist()
        for row in range(rows):
            transitions[row].append(
                (
                    env_ret.observation[row],
                    action[row],
                    following.last_reward[row],
                    following.last_terminated[row],
                    following.last_truncated[row],
                    finals[row] if ends[row] else following.observation[row],
                )
            )
        env_ret = following
    return transitions


def reference(single, seed, actions):
    """Steps a single env by the book."""
    observation, _ = single.reset(seed=seed)
    transitions = []
    for action in actions:
        following, reward, terminated, truncated, _ = single.step(action)
        transitions.append((observation, action, reward, terminated, truncated, following))
        observation = single.reset()[0] if terminated or truncated else following
    return transitions


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("task", ["Acrobot-v1", "MountainCarContinuous-v0", f"{ENVS}:Counting"])
def test_rows_give_the_transitions_of_single_envs(task):
    env = GymnasiumEnv(config(task, num_envs=3, max_episode_steps=20, seed=5), 1)
    space = gym.vector.utils.batch_space(env.get_action_space(), 3)
    space.seed(1)
    actions = [space.sample() for _ in range(70)]
    got = rollout(env, actions)
    for row in range(3):
        single = GymnasiumEnv(config(task, max_episode_steps=20)).env
        expected = reference(single, env.row_seeds[row], [action[row] for action in actions])
        assert sum(t[3] or t[4] for t in expected) >= 3
        assert_same(got[row], expected)


def test_native_cartpole_gives_the_transitions_of_single_envs():
    env = GymnasiumEnv(config(num_envs=4, max_episode_steps=30, seed=2))
    assert isinstance(env.env, SameStepCartPole)
    actions = np.random.default_rng(3).integers(0, 2, (300, 4))
    env_ret = env._reset()
    singles = [gym.make("CartPole-v1", max_episode_steps=30) for _ in range(4)]
    for row, single in enumerate(singles):
        single.reset()
        single.unwrapped.state = tuple(env.env.state[:, row])
    ends = {"terminated": 0, "truncated": 0}
    for action in actions:
        env_ret = env._step(answer(env.env_id, action))
        finals = finals_of(env_ret)
        for row, single in enumerate(singles):
            observation, reward, terminated, truncated, _ = single.step(int(action[row]))
            assert reward == env_ret.last_reward[row]
            assert terminated == env_ret.last_terminated[row]
            assert truncated == env_ret.last_truncated[row]
            if terminated or truncated:
                ends["terminated" if terminated else "truncated"] += 1
                np.testing.assert_allclose(finals[row], observation, rtol=1e-6)
                single.reset()
                single.unwrapped.state = tuple(env.env.state[:, row])
                np.testing.assert_array_equal(
                    env_ret.observation[row], np.float32(single.unwrapped.state)
                )
                assert (np.abs(env_ret.observation[row]) <= 0.05).all()
            else:
                assert row not in finals
                np.testing.assert_allclose(env_ret.observation[row], observation, rtol=1e-6)
    assert min(ends.values()) > 3


def test_types_and_statistics_of_rows():
    env = GymnasiumEnv(config(f"{ENVS}:Counting", num_envs=2))
    env_ret = env._reset()
    assert env_ret.last_reward.dtype == np.float32
    assert env_ret.last_terminated.dtype == bool
    assert "final_rows" not in env_ret.info
    first = env_ret.observation.copy()
    for _ in range(3):
        env_ret = env._step(answer(env.env_id, np.zeros((2, 1))))
    assert env_ret.info["final_rows"].dtype == np.int32
    assert env_ret.info["final_rows"].tolist() == [0, 1]
    assert env_ret.info["final_observation"].tolist() == [[0, 3], [0, 3]]
    assert env_ret.info["final_info"]["k"].tolist() == [3, 3]
    assert not {"final_obs", "_final_obs", "_final_info"} & env_ret.info.keys()
    assert env.get_env_stats() == {"return": [12.0, 2], "episode_len": [6.0, 2]}
    assert env.get_env_stats(reset=True)["return"] == [12.0, 2]
    assert env.get_env_stats() == {}
    env._reset()
    np.testing.assert_array_equal(first, [[0, 0], [0, 0]])  # later steps did not write to it


def test_nested_observations_and_actions():
    env = GymnasiumEnv(config(f"{ENVS}:Nested", num_envs=3))
    env._reset()
    action = {"grip": np.array([0, 1, 1]), "move": np.array([[0, 0], [2, 0], [0, -3]], np.float64)}
    env_ret = env._step(answer(env.env_id, action))
    assert env_ret.observation["image"].dtype == np.uint8
    assert env_ret.observation["pose"][0].shape == (3, 3)
    assert env_ret.observation["task"] == ("step 1",) * 3
    assert env_ret.action_source.tolist() == [
        ActionSource.POLICY,
        ActionSource.CLIPPED,
        ActionSource.CLIPPED,
    ]
    assert env_ret.executed_action["move"].tolist() == [[0, 0], [1, 0], [0, -1]]
    assert env_ret.executed_action["grip"].tolist() == [0, 1, 1]
    env_ret = env._step(answer(env.env_id, {**action, "move": np.zeros((3, 2))}))
    assert env_ret.executed_action is None
    final = env_ret.info["final_observation"]
    assert final["image"].shape == (3, 2, 2, 3)
    assert final["pose"][1].tolist() == [2, 2, 2]
    assert final["task"] == ("step 2",) * 3
    assert env_ret.observation["task"] == ("step 0",) * 3


def test_a_scalar_env_is_as_gymnasium_has_it():
    env = GymnasiumEnv(config(f"{ENVS}:Counting", seed=1))
    env_ret = env._reset()
    assert env_ret.observation.shape == (2,)
    assert (env_ret.last_reward, env_ret.last_terminated, env_ret.info) == (
        0.0,
        False,
        {"fresh": True},
    )
    for _ in range(3):
        env_ret = env._step(answer(env.env_id, [5.0]))
    assert (env_ret.last_reward, env_ret.last_terminated, env_ret.last_truncated) == (
        4.0,
        True,
        False,
    )
    assert env_ret.executed_action.tolist() == [1.0]
    assert env_ret.action_source == ActionSource.CLIPPED
    assert env_ret.observation.tolist() == [0, 3]  # nobody reset it
    assert env.get_env_stats() == {"return": [9.0, 1], "episode_len": [3.0, 1]}


def test_seeds_differ_by_row_and_worker_and_come_again():
    def first(worker_index, seed=7):
        return GymnasiumEnv(config("Acrobot-v1", num_envs=3, seed=seed), worker_index)._reset()

    one, again, other = first(0), first(0), first(1)
    np.testing.assert_array_equal(one.observation, again.observation)
    assert len({tuple(row) for row in [*one.observation, *other.observation]}) == 6
    assert GymnasiumEnv(config("Acrobot-v1", num_envs=2)).row_seeds is None
    native = GymnasiumEnv(config(num_envs=3, seed=7))
    assert len(set(native.row_seeds)) == 1
    np.testing.assert_array_equal(
        native._reset().observation, GymnasiumEnv(config(num_envs=3, seed=7))._reset().observation
    )


@pytest.mark.parametrize(
    ("task", "rows", "action", "message"),
    [
        ("Pendulum-v1", 3, [[0.0], [np.nan], [0.0]], "row 1: action .* is not finite"),
        ("Pendulum-v1", 1, [np.nan], "action .* is not finite"),
        ("Pendulum-v1", 3, [[0.0, 1.0]] * 3, r"expected float32\[3, 1\], got float64\[3, 2\]"),
        ("CartPole-v1", 3, [0, 1, 2], r"row 2: action 2 is not in Discrete\(2\)"),
        ("CartPole-v1", 3, [0.0, 0.5, 1.0], "row 1: action 0.5 is not in"),
        ("CartPole-v1", 3, [0.0, np.nan, 1.0], "row 1: action nan is not in"),
        ("CartPole-v1", 3, ["a", "b", "c"], "expected"),
    ],
)
def test_an_action_that_does_not_fit_is_refused_by_name(task, rows, action, message):
    env = GymnasiumEnv(config(task, num_envs=rows))
    env._reset()
    with pytest.raises(EnvError, match=message) as caught:
        env._step(answer(env.env_id, np.array(action)))
    assert env.env_id in str(caught.value)


def test_an_action_may_have_or_lack_a_last_axis_of_one():
    env = GymnasiumEnv(config("Pendulum-v1", num_envs=3))
    env._reset()
    assert env._step(answer(env.env_id, np.zeros(3))).observation.shape == (3, 3)
    discrete = GymnasiumEnv(config(num_envs=3))
    discrete._reset()
    assert discrete._step(answer(discrete.env_id, np.ones((3, 1)))).observation.shape == (3, 4)


def test_what_was_executed_has_the_form_of_the_answer():
    env = GymnasiumEnv(config("Pendulum-v1", num_envs=3))
    env._reset()
    env_ret = env._step(answer(env.env_id, np.array([0.5, -9.0, 9.0])))
    assert env_ret.executed_action.dtype == np.float64
    assert env_ret.executed_action.tolist() == [0.5, -2.0, 2.0]
    env_ret = env._step(answer(env.env_id, np.array([[0], [9], [0]])))
    assert env_ret.executed_action.tolist() == [[0.0], [2.0], [0.0]]
    tupled = ActionFitter(
        gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3, start=1))), None, "e"
    )
    fitted = tupled.fit((np.array([0.5, 2.0], np.float32), 3))
    assert fitted.source == ActionSource.CLIPPED
    assert fitted.executed[0].tolist() == [0.5, 1.0]
    assert fitted.executed[1] == fitted.action[1] == 3
    with pytest.raises(EnvError, match="expected 2 parts"):
        tupled.fit((0,))


@pytest.mark.parametrize(
    ("space", "good", "bad", "message"),
    [
        (gym.spaces.MultiDiscrete([2, 3]), [[1, 2], [0, 0]], [[1, 2], [0, 3]], "row 1"),
        (gym.spaces.MultiBinary(2), [[1, 0], [0, 0]], [[2, 0], [0, 0]], "row 0"),
        (gym.spaces.Discrete(3, start=-1), [-1, 1], [-1, 2], "row 1"),
        (gym.spaces.Box(0, 255, (1,), np.uint8), [[255], [0]], [[np.inf], [np.nan]], "row 1"),
        (gym.spaces.Dict(a=gym.spaces.Discrete(2)), {"a": [0, 1]}, {"b": [0, 1]}, "with keys"),
        (gym.spaces.Discrete(2), [0, 1], [0, 1, 1], r"int64\[2\], got int64\[3\]"),
    ],
)
def test_spaces_of_actions(space, good, bad, message):
    fitter = ActionFitter(space, 2, "e")
    assert fitter.fit(good).source is None
    with pytest.raises(EnvError, match=message):
        fitter.fit(bad)


def test_numbers_too_large_for_an_integer_action_do_not_wrap():
    fitter = ActionFitter(gym.spaces.Box(0, 255, (1,), np.uint8), 2, "e")
    fitted = fitter.fit(np.array([[300.0], [7.0]]))
    assert fitted.action.tolist() == [[255], [7]]
    assert fitted.action.dtype == np.uint8


def test_texts_pass_as_they_are():
    fitter = ActionFitter(gym.spaces.Text(5), 2, "e")
    assert fitter.fit(["a", "b"]).action == ["a", "b"]


def test_a_step_needs_a_reset():
    env = GymnasiumEnv(config())
    with pytest.raises(ResetNeededError):
        env._step(answer(env.env_id, 0))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("CartPol-v1", "no env 'CartPol-v1'; did you mean CartPole-v"),
        ("CartPole-v9", "did you mean CartPole-v"),
        ("no spaces allowed", "Malformed"),
        (f"{ENVS}:Countin", "nor has tests.unit.env.envs a class or function"),
        (f"{ENVS}:not_an_env", "nor has"),
        ("no_such_module:Env", "cannot import it"),
        ("../x:Env", "cannot import it"),
        (":Env", "no env 'Env'"),
        ("tests.unit.env.leaving:Env", "cannot import it: 3"),
        ("builtins:dict", "gave dict, no gymnasium.Env"),
    ],
)
def test_an_unknown_env_is_refused_by_name(task, message):
    with pytest.raises(ConfigError, match=message) as caught:
        GymnasiumEnv(config(task))
    assert "\n" not in str(caught.value)


def test_env_kwargs():
    env = GymnasiumEnv(config(f"{ENVS}:make_counting", env_kwargs=Config(offset=3)))
    assert env._reset().observation.tolist() == [3, 0]
    with pytest.raises(ConfigError, match="nope"):
        GymnasiumEnv(config(f"{ENVS}:make_counting", env_kwargs=Config(nope=3)))
    # The native vector env does not take it, so single envs are stepped.
    env = GymnasiumEnv(config(num_envs=2, env_kwargs=Config(sutton_barto_reward=True)))
    assert isinstance(env.env, SameStepCartPole)


def test_a_wrong_observation_is_refused():
    for rows in (1, 2):
        env = GymnasiumEnv(config(f"{ENVS}:WrongShape", num_envs=rows))
        with pytest.raises(EnvError, match=r"expected float32\[5\], got float32\[2\]"):
            env._reset()


@pytest.mark.parametrize("rows", [1, 2])
def test_an_env_of_the_older_interface_is_told_of_the_new_one(rows):
    env = GymnasiumEnv(config(f"{ENVS}:OldReset", num_envs=rows))
    with pytest.raises(ObservationError, match=r"reset has to return \(observation, info\)"):
        env._reset()
    env = GymnasiumEnv(config(f"{ENVS}:OldStep", num_envs=rows))
    env._reset()
    with pytest.raises(ObservationError, match=r"step has to return .*, returned 4 values"):
        env._step(answer(env.env_id, np.zeros((rows, 1) if rows > 1 else 1)))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_wrong_observation_is_refused_in_the_middle_of_an_episode(rows):
    env = GymnasiumEnv(config(f"{ENVS}:WrongLater", num_envs=rows))
    env._reset()
    with pytest.raises(ObservationError, match=r"expected float32\[2\], got float32\[1\]"):
        env._step(answer(env.env_id, np.zeros((rows, 1) if rows > 1 else 1)))


def test_evaluate_cfg_is_applied_and_undone():
    evaluate_cfg = Config(env_kwargs={"offset": 100})
    env = GymnasiumEnv(config(f"{ENVS}:Counting", evaluate_cfg=evaluate_cfg))
    env._reset()
    env.apply_evaluate_cfg()
    with pytest.raises(ResetNeededError):
        env._step(answer(env.env_id, [0.0]))
    assert env._reset().observation.tolist() == [100, 0]
    env.restore_evaluate_cfg()
    assert env._reset().observation.tolist() == [1, 0]
    env.close()
    wrong = GymnasiumEnv(config(f"{ENVS}:Counting", evaluate_cfg=Config(num_envs=2)))
    with pytest.raises(ConfigError, match="expected 1, got 2"):
        wrong.apply_evaluate_cfg()
