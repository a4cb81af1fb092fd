"""One training of Stable-Baselines3, in a venv that has it; see prove_learning.py.

Usage: `python sb3_baseline.py CELL SEED STEPS`. The hyperparameters are those of
its Zoo. Prints the env step at which each episode ended, and its return, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

WIDE: dict[str, Any] = {"net_arch": [256, 256]}
SMALL: dict[str, Any] = {"net_arch": [64, 64]}


def make(cell: str, seed: int) -> Any:
    if cell == "cartpole_ppo":
        settings = {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98}
        return PPO(
            "MlpPolicy",
            make_vec_env("CartPole-v1", 8, seed),
            **settings,
            n_epochs=20,
            ent_coef=0.0,
            learning_rate=lambda left: left * 1e-3,
            clip_range=lambda left: left * 0.2,
            policy_kwargs=SMALL,
            seed=seed,
            device="cpu",
        )
    if cell == "cartpole_dqn":
        return DQN(
            "MlpPolicy",
            make_vec_env("CartPole-v1", 1, seed),
            learning_rate=2.3e-3,
            batch_size=64,
            buffer_size=100_000,
            learning_starts=1000,
            gamma=0.99,
            target_update_interval=10,
            train_freq=256,
            gradient_steps=128,
            exploration_fraction=0.16,
            exploration_final_eps=0.04,
            policy_kwargs=WIDE,
            seed=seed,
            device="cpu",
        )
    if cell == "pendulum_sac":
        return SAC(
            "MlpPolicy",
            make_vec_env("Pendulum-v1", 1, seed),
            learning_rate=1e-3,
            seed=seed,
            device="cpu",
        )
    if cell == "halfcheetah_sac":
        return SAC(
            "MlpPolicy",
            make_vec_env("HalfCheetah-v5", 1, seed),
            learning_starts=10_000,
            seed=seed,
            device="cpu",
        )
    if cell == "halfcheetah_ppo":
        return PPO(
            "MlpPolicy",
            VecNormalize(make_vec_env("HalfCheetah-v5", 1, seed), gamma=0.98),
            n_steps=512,
            batch_size=64,
            gamma=0.98,
            learning_rate=2.0633e-05,
            ent_coef=0.000401762,
            clip_range=0.1,
            n_epochs=20,
            gae_lambda=0.92,
            max_grad_norm=0.8,
            vf_coef=0.58096,
            policy_kwargs={
                "log_std_init": -2,
                "ortho_init": False,
                "activation_fn": nn.ReLU,
                "net_arch": {"pi": [256, 256], "vf": [256, 256]},
            },
            seed=seed,
            device="cpu",
        )
    raise SystemExit(f"no cell {cell}")


class Episodes(BaseCallback):
    """Collects every finished episode."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.found.append((self.num_timesteps, float(info["episode"]["r"])))
        return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    cell, seed, steps = sys.argv[1:]
    episodes = Episodes()
    make(cell, int(seed)).learn(int(steps), callback=episodes)
    print(json.dumps(episodes.found))
