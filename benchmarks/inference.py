"""Inference alone, against calling the network on resident tensors: rows in, answers on the host out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import torch

from benchmarks.harness import Ratio, report, run_rounds
from rlightning.policy import BasePolicy, build_policy
from rlightning.policy.inference import Inference, Part
from rlightning.policy.layout import InputLayout
from rlightning.types import EnvMeta, EnvRet, Mode
from rlightning.utils.config import Config, PolicyConfig

PICTURES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
MODEL = {
    "convolutions": [[32, 8, 4], [64, 4, 2], [64, 3, 1]],
    "features": 512,
    "hidden": [],
    "activation": "relu",
}
GROUPS = 16
FLOOR = 0.7
NETWORK = "network on resident tensors"


def _policy(device: str, rows: int) -> BasePolicy:
    config = PolicyConfig(device=device, seed=0, max_batch_rows=rows, model_cfg=Config(**MODEL))
    policy = build_policy(config, "eval")
    policy.init_eval(env_meta=EnvMeta("env", gym.spaces.Discrete(6), PICTURES, rows // GROUPS))
    return policy


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the table, on CUDA if there is any; a CPU gets fewer rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 4096 if device == "cuda" else 256
    torch.set_num_threads(1)
    policy = _policy(device, rows)
    layout = InputLayout(PICTURES)
    inference = Inference(policy, layout)
    gatherer = ThreadPoolExecutor(1)
    rng = np.random.default_rng(0)
    seen = rng.integers(0, 256, (GROUPS, rows // GROUPS, *PICTURES.shape), np.uint8)
    parts = [Part(f"env-{i}", *layout.flatten(EnvRet("", one))) for i, one in enumerate(seen)]
    resident = torch.from_numpy(seen.reshape(rows, *PICTURES.shape)).to(device)

    def call_network() -> None:
        with torch.inference_mode():
            features = policy.features(resident)  # type: ignore[attr-defined]
            policy.actor(features), policy.critic(features)  # type: ignore[attr-defined]
        if device == "cuda":
            torch.cuda.synchronize()

    def rate(call: Callable[[], object]) -> float:
        begun, calls = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds or not calls:
            call()
            calls += 1
        return calls * rows / (time.perf_counter() - begun)

    def rate_ahead(parts: Sequence[Part]) -> float:
        """As a policy server on CUDA: one batch is gathered while the one before is in the network."""
        ahead = gatherer.submit(inference.gather, parts, Mode.EXPLORE)

        def call() -> None:
            nonlocal ahead
            answer = ahead.result()
            ahead = gatherer.submit(inference.gather, parts, Mode.EXPLORE)
            answer()

        result = rate(call)
        ahead.result()
        return result

    measured = "inference"
    cells = {
        NETWORK: lambda: rate(call_network),
        measured: lambda: rate(lambda: inference.run(parts, Mode.EXPLORE)),
    }
    if device == "cuda":
        cells["inference, gathered ahead"] = lambda: rate_ahead(parts)
        # What a batch takes whose rows lie in pinned memory already, copies to and fro included.
        measured = "inference from pinned memory, gathered ahead"
        values, _ = layout.flatten(EnvRet("", seen.reshape(rows, *PICTURES.shape)))
        pinned = [Part("env", [torch.from_numpy(one).pin_memory() for one in values], rows)]
        cells[measured] = lambda: rate_ahead(pinned)
    ratios = [
        Ratio(f"{name} / {NETWORK}", name, NETWORK, floor=FLOOR if name == measured else None)
        for name in cells
        if name != NETWORK
    ]
    title = f"Inference, CNN, {rows} rows in {GROUPS} groups, {device}"
    table = run_rounds(cells, rounds=rounds, unit="rows/s")
    return report(title, table, ratios, slack=slack)
