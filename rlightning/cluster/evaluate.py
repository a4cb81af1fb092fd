"""Evaluates a checkpoint of a run: exploits, with fixed seeds, and stores nothing for training."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import typer
from rich.table import Table

from rlightning.chunks import ChunkedActions
from rlightning.cluster.display import make_console, print_table
from rlightning.cluster.guard import require, require_policy_server
from rlightning.cluster.past_runs import config_of, read_checkpoint
from rlightning.env.episodes import EpisodeLog
from rlightning.env.hosting import HostedGroup, close_groups, host_envs
from rlightning.env.utils.film import FilmWriter
from rlightning.errors import ConfigError
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvRet, Mode, Purpose
from rlightning.utils.config import EnvConfig, MainConfig

if TYPE_CHECKING:
    from rlightning.learner.checkpoints import Checkpoint

_MOST_ROWS = 16
_SUCCESS_KEYS = ("is_success", "success")
_Z_95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class EvaluatedEpisode:
    """One episode.

    Attributes:
        episode_return: Sum of its rewards.
        length: Its steps.
        success: What the env said of it in `is_success` or `success` of its last info, or whether
            its return reached the target; None if there is neither.
    """

    episode_return: float
    length: int
    success: bool | None


@dataclass(frozen=True)
class Evaluation:
    """What a checkpoint achieves.

    Attributes:
        checkpoint: Its folder.
        policy_version: Version of its weights.
        seed: Seed of the envs.
        episodes: The episodes, by row of the envs and then in order.
        video: The film of them; None if none was made.
    """

    checkpoint: str
    policy_version: int
    seed: int
    episodes: list[EvaluatedEpisode]
    video: str | None = None

    def summary(self) -> dict[str, Any]:
        """Returns mean, spread, success rate and its 95 % interval, as plain data."""
        returns = [episode.episode_return for episode in self.episodes]
        successes = [e.success for e in self.episodes if e.success is not None]
        rate = sum(successes) / len(successes) if successes else None
        interval = wilson_interval(sum(successes), len(successes)) if successes else None
        return {
            "episodes": len(returns),
            "mean_return": statistics.fmean(returns),
            "std_return": statistics.stdev(returns) if len(returns) > 1 else None,
            "min_return": min(returns),
            "median_return": statistics.median(returns),
            "max_return": max(returns),
            "mean_length": statistics.fmean(episode.length for episode in self.episodes),
            "success_rate": rate,
            "success_interval": None if interval is None else list(interval),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain data: for `--json`."""
        return {**asdict(self), "summary": self.summary()}


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Returns the 95 % interval of a success rate (Wilson, JASA 22 (1927), 209-212).

    Args:
        successes: How many trials succeeded.
        trials: How many there were, at least 1.
    """
    rate, square = successes / trials, _Z_95**2 / trials
    middle = rate + square / 2
    spread = _Z_95 * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials))
    return max(0.0, (middle - spread) / (1 + square)), min(1.0, (middle + spread) / (1 + square))


def evaluate(
    run: Path,
    *,
    episodes: int,
    link: str = "best",
    seed: int = 0,
    success_return: float | None = None,
    video: bool = False,
) -> Evaluation:
    """Lets the policy of a checkpoint act until it has finished some episodes.

    The envs are made here, as the config of the run describes them with `env.evaluate_cfg` on top.
    Each row of them finishes its share of the episodes, so that short ones are not preferred.

    Args:
        run: Folder of the run.
        episodes: How many, at least 1.
        link: `best` or `latest`.
        seed: Seed of the envs.
        success_return: Return from which on an episode of an env that does not judge itself is a
            success; None: `train.target_return` of the run.
        video: Write all episodes, one after the other, as `<run>/videos/<version>.mp4`.

    Raises:
        ConfigError: There is no such checkpoint, a library is missing, or the env shows no
            pictures.
        RLightningError: The env or the policy failed.
    """
    require_policy_server()
    if video:
        require("--video", "video", "imageio_ffmpeg")
    config = config_of(run)
    checkpoint = read_checkpoint(run, link, config)
    rows = 1 if video else min(episodes, _MOST_ROWS)
    env = _env_config(config, rows, seed, video=video)
    target = config.train.target_return if success_return is None else success_return
    film = _Film() if video else None
    found = shared_loop().run(_act(config, env, checkpoint, episodes, target, film))
    path = None if film is None else film.write(run / "videos" / f"{checkpoint.policy_version}.mp4")
    return Evaluation(
        str(checkpoint.path), checkpoint.policy_version, seed, found, None if path is None else path
    )


def show_evaluation(evaluation: Evaluation, *, as_json: bool) -> None:
    """Prints an evaluation as a table, or as one JSON line."""
    if as_json:
        typer.echo(json.dumps(evaluation.to_dict()))
        return
    summary = evaluation.summary()
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in ("mean_return", "std_return", "min_return", "median_return", "max_return"):
        table.add_row(name.replace("_", " "), _figure(summary[name]))
    table.add_row("mean length", _figure(summary["mean_length"]))
    rate, interval = summary["success_rate"], summary["success_interval"]
    if interval is not None:
        low, high = (f"{100 * bound:.1f}" for bound in interval)
        table.add_row("success rate", f"{100 * rate:.1f} % (95 % interval {low} to {high} %)")
    console = make_console()
    episodes, version = summary["episodes"], evaluation.policy_version
    console.print(
        f"{evaluation.checkpoint}: version {version}, {episodes} episodes", soft_wrap=True
    )
    print_table(console, table)
    if evaluation.video is not None:
        console.print(f"wrote {evaluation.video}", soft_wrap=True)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _env_config(config: MainConfig, rows: int, seed: int, *, video: bool) -> EnvConfig:
    if not config.env:
        raise ConfigError("the run has no env that can be made here")
    own = config.env[0].to_dict()
    changed = {} if config.env[0].evaluate_cfg is None else config.env[0].evaluate_cfg.to_dict()
    merged = {**own, **changed, "num_envs": rows, "num_workers": 1, "seed": seed}
    if video:
        merged["env_kwargs"] = {**dict(merged["env_kwargs"]), "render_mode": "rgb_array"}
    return EnvConfig(**merged)


async def _act(
    config: MainConfig,
    env: EnvConfig,
    checkpoint: Checkpoint,
    episodes: int,
    target: float | None,
    film: _Film | None,
) -> list[EvaluatedEpisode]:
    # Not before now: these load torch.
    from rlightning.policy import LocalPolicy, PolicyHost
    from rlightning.policy.weight_store import Weights

    log = EpisodeLog(capacity=episodes + _MOST_ROWS)
    host = PolicyHost(config.policy.model_copy(update={"state_dir": None}))
    await host.start()
    groups: list[HostedGroup] = []
    try:
        groups = await host_envs([env], pipeline_depth=1, log=log)
        await host.publish(Weights.of(checkpoint.policy_version, checkpoint.weights))
        policy = LocalPolicy(host, groups[0].meta)
        await policy.start()
        space = groups[0].meta.action_space
        assert isinstance(space, gym.Space)
        acting = ChunkedActions(policy, None, space)
        return await _finish_episodes(acting, groups[0], log, episodes, target, film)
    finally:
        await close_groups(groups)
        await host.close()


async def _finish_episodes(
    policy: ChunkedActions,
    group: HostedGroup,
    log: EpisodeLog,
    episodes: int,
    target: float | None,
    film: _Film | None,
) -> list[EvaluatedEpisode]:
    rows = group.meta.num_envs or 1
    shares = [episodes // rows + (row < episodes % rows) for row in range(rows)]
    found: list[list[EvaluatedEpisode]] = [[] for _ in range(rows)]
    cursor = log.cursor
    env_ret = await group.reset()
    while any(len(mine) < share for mine, share in zip(found, shares, strict=True)):
        if film is not None:
            await group.call(film.take)
        response = await policy.act(env_ret, mode=Mode.EXPLOIT, purpose=Purpose.EVAL)
        env_ret = await group.step(response)
        records, cursor = log.since(cursor) if log.cursor > cursor else [], log.cursor
        for position, record in enumerate(records):
            if len(found[record.row]) == shares[record.row]:
                continue
            success = _said_success(env_ret, position)
            if success is None and target is not None:
                success = record.episode_return >= target
            one = EvaluatedEpisode(record.episode_return, record.length, success)
            found[record.row].append(one)
    return [episode for mine in found for episode in mine]


def _said_success(env_ret: EnvRet, position: int) -> bool | None:
    """Returns what the env said of the episode at a position of `final_rows`."""
    final: Mapping[str, Any] = env_ret.info.get("final_info") or {}
    for name in _SUCCESS_KEYS:
        if name in final:
            return bool(np.asarray(final[name]).reshape(-1)[position])
    return None


class _Film:
    """Pictures of an env of one row."""

    def __init__(self) -> None:
        self._frames: list[Any] = []
        self._fps = 30.0

    def take(self, env: Any) -> None:
        """Adds a picture of what the env shows now."""
        inner = env.env
        frame = inner.render() if hasattr(inner, "render") else None
        if not isinstance(frame, np.ndarray):
            raise ConfigError(
                f"--video: {env.config.task} shows no pictures (render_mode rgb_array)"
            )
        self._fps = float(inner.metadata.get("render_fps") or self._fps)
        self._frames.append(frame)

    def write(self, path: Path) -> str:
        """Writes an mp4 file and returns its path."""
        path.parent.mkdir(exist_ok=True)
        with FilmWriter(path, self._fps) as writer:
            for frame in self._frames:
                writer.append(frame)
        return str(path)
