"""The envs that `rlightning attach` makes: by id, by class, and by backend."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import pytest

from rlightning.cluster.attach import _line, make_attached
from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.remote_env import AttachStatus, ControlStatus
from rlightning.errors import ConfigError

ENVS = "tests.unit.env.envs"


def test_a_backend_is_given_its_task_and_its_options() -> None:
    settings = ["env.env_kwargs={map_name: 8x8}", "env.env_kwargs.is_slippery=false"]
    settings += ["env.max_episode_steps=7", "env.seed=3"]
    env = make_attached("gymnasium", task="FrozenLake-v1", num_envs=2, settings=settings)
    assert type(env) is GymnasiumEnv
    assert (env.num_envs, env.max_episode_steps, env.config.seed) == (2, 7, 3)
    assert env.get_observation_space() == gym.spaces.Discrete(64)
    env.close()


def test_ids_and_classes_take_options_too() -> None:
    env = make_attached("FrozenLake-v1", settings=["env.env_kwargs.map_name=8x8"])
    assert env.get_observation_space() == gym.spaces.Discrete(64)
    env.close()
    env = make_attached(f"{ENVS}:make_counting", settings=["env.env_kwargs.offset=9"])
    assert env.reset().observation[0] == 9
    env.close()


def test_a_class_of_this_library_is_a_backend() -> None:
    backend = "rlightning.env.gymnasium_env:GymnasiumEnv"
    env = make_attached(backend, settings=["env.task=CartPole-v1", "env.max_episode_steps=3"])
    assert (env.config.backend, env.config.task) == (backend, "CartPole-v1")
    env.close()


@pytest.mark.parametrize("task", [None, "FrozenLake-v1"])
@pytest.mark.parametrize("setting", ["env.task=FrozenLake-v1", " env.task = FrozenLake-v1"])
def test_a_task_that_is_set_is_the_task(setting: str, task: str | None) -> None:
    env = make_attached("gymnasium", task=task, settings=[setting])
    assert env.config.task == "FrozenLake-v1"
    env.close()


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("maniskill", {}, "--task: expected what the backend 'maniskill' shall make"),
        ("gymnasium", {}, "--task: expected what the backend 'gymnasium' shall make"),
        ("CartPole-v1", {"task": "x"}, "--task: 'CartPole-v1' says what is made already"),
        ("CartPole-v1", {"settings": ["env.task=x"]}, "--set env.task: 'CartPole-v1' says what is"),
        ("gymnasium", {"task": "x", "settings": ["env.task=y"]}, "env.task=y: --task says 'x'"),
        ("gymnasium", {"settings": ["env.task=3"]}, "--set env.task=3: expected a string, got 3"),
        (
            "piper",
            {"settings": ["env.task=null"]},
            "--set env.task=null: expected a string, got None",
        ),
        ("env_server", {"task": "x"}, "'env_server' is no env that could be attached"),
        ("gymnasum", {}, r"no env 'gymnasum'.*\(or the backend 'gymnasium'\?\)"),
        ("gymnasium", {"task": "CartPole-v9"}, "env.task 'CartPole-v9'"),
        ("piper", {"num_envs": 2}, "'piper' needs num_envs 1, got 2"),
        ("CartPole-v1", {"settings": ["env.env_kwarg.a=1"]}, "did you mean env.env_kwargs?"),
        (
            "CartPole-v1",
            {"settings": ["train.lr=1"]},
            "--set train.lr=1: of an env that is attached, expected env.env_kwargs, ",
        ),
        ("CartPole-v1", {"settings": ["env.seed"]}, "--set env.seed: expected key=value"),
        ("CartPole-v1", {"settings": ["env.seed=x"]}, "--set env.seed=x: 'env.0.seed': expected"),
        ("CartPole-v1", {"settings": ["env.env_kwargs.a=1"]}, "unexpected keyword argument 'a'"),
    ],
)
def test_what_does_not_fit_is_named(env: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_attached(env, **options)


def test_the_status_is_one_line() -> None:
    control = ControlStatus(
        connected=False,
        jitter_ms=1.23,
        age_p50_ms=40.4,
        age_p99_ms=95.2,
        held=1200,
        zeroed=34,
        waited=5,
        missed=6,
        skipped=7,
        too_old=8,
        spooled=21,
        spooled_bytes=2100,
        dropped=3,
        uncertain=0,
    )
    status = AttachStatus("running", 4321, 5, 2, env_errors=0, policy_version=17, control=control)
    assert _line(status, 14.6) == (
        "running     steps 4,321 (15/s)  jitter 1.2 ms  action age 40/95 ms  link down  "
        "held 1,234  spooled 21  dropped 3  reconnects 2  version 17"
    )
    assert "link up" in _line(replace(status, control=replace(control, connected=True)), 14.6)
    asked = replace(status, control=None, state="connecting", trouble="connection refused")
    assert _line(asked, 10.0) == (
        "connecting  steps 4,321 (10/s)  episodes 5  version 17  reconnects 2  env errors 0  "
        "(connection refused)"
    )
