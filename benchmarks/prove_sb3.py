"""Stable-Baselines3 in remote envs: `make prove-sb3`, or `python -m benchmarks.prove_sb3 [SEEDS]`; needs that library.

An env server in a process of its own hosts CartPole for drivers. Measures what 64 rows in one env save against one row, and
lets an unmodified PPO learn with each seed. Exits 1 when a seed failed or the ratio is below its floor.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Ratio, machine, report, run_rounds
from rlightning.env.gym_client import RemoteEnv, RemoteVecEnv
from rlightning.testing import ServerProcess

ROWS = 64
ROUNDS = 7
SECONDS = 1.0
STEPS = 100_000
TARGET = 475
CONFIG = f"""
env:
- {{name: one, backend: gymnasium, task: CartPole-v1, driver: external}}
- {{name: rows, backend: gymnasium, task: CartPole-v1, driver: external, num_envs: {ROWS}}}
- {{name: few, backend: gymnasium, task: CartPole-v1, driver: external, num_envs: 8}}
"""


@contextmanager
def env_server() -> Iterator[str]:
    """Runs an env server; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        command = ["-m", "rlightning.services.env_server", "--config", str(config)]
        with ServerProcess(command, Path(folder)) as process:
            yield process.address(120.0)


def rates(address: str) -> bool:
    """Measures env steps per second of one scalar env and of 64 rows; returns whether the ratio is good."""
    scalar, rows = RemoteEnv(address, "one-0-0"), RemoteVecEnv(address, ["rows-0-0"])
    scalar.reset(seed=0)
    rows.reset()
    actions = np.random.default_rng(0).integers(0, 2, (1000, ROWS))

    def step_scalar() -> float:
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < SECONDS:
            _, _, terminated, truncated, _ = scalar.step(int(actions[count % 1000, 0]))
            if terminated or truncated:
                scalar.reset()
            count += 1
        return count / elapsed

    def step_rows() -> float:
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < SECONDS:
            rows.step(actions[count % 1000])
            count += 1
        return count * ROWS / elapsed

    table = run_rounds(
        {"RemoteEnv": step_scalar, f"RemoteVecEnv, {ROWS} rows": step_rows},
        rounds=ROUNDS,
        unit="env steps/s",
    )
    ratio = Ratio(
        f"{ROWS} remote rows / one remote env", f"RemoteVecEnv, {ROWS} rows", "RemoteEnv", floor=20
    )
    good = report("Rows against messages", table, [ratio])
    scalar.close()
    rows.close()
    return good


def learn(address: str, seed: int) -> bool:
    """Lets PPO learn, with the hyperparameters of its zoo for CartPole; prints a line of the table."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
    from stable_baselines3.common.vec_env import VecMonitor

    envs = VecMonitor(RemoteVecEnv(address, ["few-0-0"]))
    judge = VecMonitor(RemoteVecEnv(address, ["rows-0-0"]))
    solved = StopTrainingOnRewardThreshold(TARGET, verbose=0)
    callback = EvalCallback(
        judge, callback_on_new_best=solved, n_eval_episodes=ROWS, eval_freq=640, verbose=0
    )
    options: dict[str, Any] = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98}
    model = PPO(
        "MlpPolicy",
        envs,
        gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=seed,
        device="cpu",
        **options,
    )
    start = time.perf_counter()
    model.learn(STEPS, callback=callback)
    wall = time.perf_counter() - start
    best = callback.best_mean_reward
    print(f"| {seed} | {wall:.1f} | {model.num_timesteps:,} | {best:.1f} |", flush=True)
    envs.close()
    judge.close()
    return bool(best >= TARGET)


def main() -> int:
    """Measures, learns, reports."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(machine())
    with env_server() as address:
        good = rates(address)
        print("\n### PPO of Stable-Baselines3 in CartPole, 8 remote rows\n")
        print("| seed | wall s | env steps | best mean return of 64 episodes |\n|---|---|---|---|")
        results = [learn(address, seed) for seed in range(seeds)]
    print(f"\n{sum(results)} of {seeds} solved")
    return 0 if good and all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
