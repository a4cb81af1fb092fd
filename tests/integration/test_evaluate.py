"""Evaluation of a checkpoint, from the folder of a run to figures and a film."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.cluster.evaluate import evaluate, show_evaluation, wilson_interval
from rlightning.cluster.runs import Run
from rlightning.errors import ConfigError
from rlightning.learner.checkpoints import Checkpoints
from rlightning.learner.loop import LearnerStats
from rlightning.policy import BasePolicy, build_policy, dump_weights, policy_weights
from rlightning.policy.base_policy import PolicyInput
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import MainConfig

SPACE = gym.spaces.Box(0, 255, (1,), np.float32)


class Judged(gym.Env[Any, Any]):
    """Episodes of some steps; those of an even number are a success. Pays for the action 1."""

    observation_space = SPACE
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = self.length = int(self.np_random.integers(2, 9))
        return np.array([self.left], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        info = {"success": self.length % 2 == 0}
        return np.array([self.left], np.float32), float(action), self.left == 0, False, info

    def render(self) -> Any:
        return None if self.render_mode is None else np.full((33, 49, 3), 20 * self.left, np.uint8)


class Greedy(BasePolicy):
    """Takes the action 1 when it exploits."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.net = nn.Linear(1, 1)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        assert isinstance(env_ret, PolicyInput)
        best = int(env_ret.mode is Mode.EXPLOIT)
        action = torch.full((len(env_ret.observation),), best)
        return PolicyResponse(env_ret.env_id, action=action)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gym.register("Judged-v0", entry_point=Judged)
    folder = tmp_path_factory.mktemp("runs")
    config = MainConfig.from_dict(
        {
            "env": {"name": "judged", "backend": "gymnasium", "task": "Judged-v0"},
            "policy": {"type": f"{__name__}:Greedy", "device": "cpu"},
            "log": {"log_dir": str(folder)},
        }
    )
    made = Run.create(config, command=[])
    policy = build_policy(config.policy, "train")
    policy.init_train(env_meta=EnvMeta("a", gym.spaces.Discrete(2), SPACE, 1))
    weights = dump_weights(policy_weights(policy))
    Checkpoints(made.checkpoints).save(LearnerStats(policy_version=3), weights)
    return made.path.resolve()


def test_each_episode_is_exploited_judged_by_its_env_and_the_same_with_one_seed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = evaluate(run, episodes=20)
    assert (first.policy_version, first.seed, len(first.episodes)) == (3, 0, 20)
    for one in first.episodes:
        assert one.episode_return == one.length
        assert one.success == (one.length % 2 == 0)
    assert evaluate(run, episodes=20).episodes == first.episodes
    assert evaluate(run, episodes=20, seed=5).episodes != first.episodes
    wins = sum(one.success is True for one in first.episodes)
    assert 0 < wins < 20
    show_evaluation(first, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["summary"]["success_rate"] == wins / 20
    assert said["summary"]["success_interval"] == pytest.approx(wilson_interval(wins, 20))
    assert [one["length"] for one in said["episodes"]] == [one.length for one in first.episodes]
    show_evaluation(first, as_json=False)
    low, high = (100 * bound for bound in wilson_interval(wins, 20))
    line = f"success rate   {5 * wins:.1f} % (95 % interval {low:.1f} to {high:.1f} %)"
    assert line in capsys.readouterr().out


def test_a_film_has_a_picture_of_every_step(run: Path) -> None:
    evaluation = evaluate(run, episodes=3, video=True)
    assert evaluation.video == str(run / "videos" / "3.mp4")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", evaluation.video]
    done = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "gray", "-"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    film = np.frombuffer(done.stdout, np.uint8).reshape(-1, 32, 48)
    left = [n for one in evaluation.episodes for n in range(one.length, 0, -1)]
    assert np.allclose(film.mean(axis=(1, 2)), [20 * n for n in left], atol=8)


def test_an_env_that_shows_nothing_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judged, "render", lambda self: None)
    with pytest.raises(ConfigError, match="--video: Judged-v0 shows no pictures"):
        evaluate(run, episodes=1, video=True)
