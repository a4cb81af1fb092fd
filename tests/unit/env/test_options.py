"""Options that nobody reads are errors, and name what was meant."""

from __future__ import annotations

import pytest

from rlightning.env.base_env import BaseEnv
from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.isaac_env import IsaacEnv
from rlightning.env.libero_env import LiberoEnv
from rlightning.env.maniskill_env import ManiskillEnv
from rlightning.env.pettingzoo_env import PettingZooEnv
from rlightning.env.piper_env import PiperEnv, PiperOptions
from rlightning.env.utils.options import adapter_options, check_auto_reset
from rlightning.env.utils.video import VideoOptions
from rlightning.errors import ConfigError
from rlightning.utils.registry import ENVS
from tests.unit.env.envs import config


@pytest.mark.parametrize("backend", sorted(ENVS))
def test_every_adapter_refuses_a_key_that_nobody_reads(backend: str) -> None:
    adapter = ENVS.get(backend)
    with pytest.raises(
        ConfigError,
        match=rf"env.max_episode_step: {adapter.__name__} has no such option; did you mean "
        "'max_episode_steps'",
    ):
        adapter(config(backend=backend, max_episode_step=3))


def test_an_env_of_ones_own_reads_what_it_likes() -> None:
    class Own(GymnasiumEnv):
        option_names = ("speed",)

    assert BaseEnv.option_names is None
    env = Own(config(speed=3))
    assert env.config["speed"] == 3
    env.close()
    with pytest.raises(ConfigError, match="env.colour: Own has no such option; known: .*speed"):
        Own(config(colour=3))


def test_an_evaluation_has_no_other_keys() -> None:
    env = GymnasiumEnv(config(evaluate_cfg={"num_env": 3}))
    with pytest.raises(ConfigError, match="env.num_env: .* did you mean 'num_envs'"):
        env.apply_evaluate_cfg()
    env.close()


def test_options_come_from_either_place() -> None:
    defaults = {"camera": None, "speed": 1, "video_cfg": None}
    given = config(speed=2, video_cfg={"fps": 3}, env_kwargs={"camera": "top"})
    options = adapter_options(given, defaults)
    assert options == {"camera": "top", "speed": 2, "video_cfg": {"fps": 3}}
    with pytest.raises(
        ConfigError, match="env.env_kwargs.camra: no such option; did you mean 'camera'"
    ):
        adapter_options(config(env_kwargs={"camra": 1}), defaults)
    for section in (config(zoom=1), config(env_kwargs={"zoom": 1})):
        with pytest.raises(ConfigError, match="env.env_kwargs.zoom: not supported: no lens"):
            adapter_options(section, defaults, {"zoom": "no lens"})


@pytest.mark.parametrize("name", ["intel_viewer_mapping", "visdom_config"])
def test_what_the_arm_has_not_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: not supported: "):
        PiperEnv(config(backend="piper", **{name: {"a": 1}}))
    assert PiperOptions.of(config(backend="piper", move_speed=20)).move_speed == 20


def test_rows_that_reset_themselves_cannot_be_told_not_to() -> None:
    check_auto_reset(config(), {"auto_reset": False})
    check_auto_reset(config(num_envs=2), {"auto_reset": True})
    with pytest.raises(ConfigError, match="env.env_kwargs.auto_reset: several rows reset"):
        check_auto_reset(config(num_envs=2), {"auto_reset": False})
    for adapter in (LiberoEnv, ManiskillEnv):
        assert {"auto_reset", "video_cfg"} <= set(adapter.option_names or ())
    assert set(IsaacEnv.option_names or ()) == {"launcher", "env_spec", "env_cfg", "device"}
    assert PettingZooEnv.option_names == ()


def test_a_film_has_no_other_options() -> None:
    assert VideoOptions.of(None) == VideoOptions()
    with pytest.raises(ConfigError, match="video_cfg.save_vido: .*did you mean 'save_video'"):
        VideoOptions.of({"save_vido": True})
