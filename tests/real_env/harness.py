"""What the tests of all adapters do: collect through real servers, step the env directly, compare."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rlightning.buffer.remote_buffer import SampleClient
from tests.service_processes import Services

SEED = 11
COMPARED = ("observation", "next_observation", "reward", "terminated", "truncated")


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a process that has loaded nothing before; a simulator needs that."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result(timeout=600)


def row_seeds(rows: int, *, worker: int = 0, seed: int = SEED) -> list[int]:
    """The seeds of the rows' first resets, as `GymnasiumEnv` says."""
    words = np.random.SeedSequence([seed, worker]).generate_state(rows, np.uint32)
    return [int(word) >> 1 for word in words]


@asynccontextmanager
async def running(
    folder: Path,
    env: Mapping[str, Any],
    *,
    steps: int,
    scale: float | None = None,
    start_s: float = 300.0,
) -> AsyncIterator[tuple[Services, SampleClient]]:
    """Lets a random policy step an env through an env, a policy and a buffer server.

    Args:
        folder: For logs and the config.
        env: The section of the config.
        steps: Length of a rollout.
        scale: Factor on the actions of the policy.
        start_s: How long the env may take to be there.
    """
    config = {
        "env": {"name": "real", "seed": SEED, **env},
        "policy": {
            "type": "tests.real_env.policy:Random",
            "device": "cpu",
            "initial_weights": "random",
            "model_cfg": {} if scale is None else {"scale": scale},
        },
        "buffer": {"type": "RolloutBuffer", "capacity": 4096, "rollout_length": steps},
        # Simulators take their time to close.
        "services": {"env": {"pipeline_depth": 1}, "grace_s": 60},
    }
    with Services(folder, json.dumps(config)) as services:
        await asyncio.to_thread(services.wait_serving, timeout_s=start_s)
        async with SampleClient(services.addresses["buffer"]) as samples:
            yield services, samples
        for name in ("env", "policy", "buffer"):
            process = services.processes[name]
            process.terminate()
            assert process.wait(90) == 0, process.log
        assert "Traceback" not in services.processes["env"].log, services.processes["env"].log


async def collect(
    folder: Path,
    env: Mapping[str, Any],
    *,
    steps: int = 200,
    step_s: float = 300.0,
    **options: Any,
) -> dict[str, Any]:
    """Returns the columns of one rollout, [steps, rows, ...]; options are those of `running`."""
    async with running(folder, env, steps=steps, **options) as (_, samples):
        batch = await samples.next_batch(step_s)
    assert len(batch.columns["step"]) == steps
    return dict(batch.columns)


class Recorder:
    """Puts the transitions of an env that is stepped directly into columns [steps, rows, ...]."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []

    def add(self, observation, reward, terminated, truncated, next_observation) -> None:
        """Adds one step of all rows; leaves [rows, ...], copied."""
        self._steps.append(
            _map(
                lambda leaf: np.array(leaf),
                {
                    "observation": observation,
                    "next_observation": next_observation,
                    "reward": reward,
                    "terminated": terminated,
                    "truncated": truncated,
                },
            )
        )

    def columns(self) -> dict[str, Any]:
        return _stack(self._steps)


def step_rows(envs, seeds, actions) -> dict[str, Any]:
    """Steps gymnasium envs one by one with the actions [steps, rows, ...] of a rollout."""
    recorder = Recorder()
    now = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    for action in actions:
        rows = [env.step(one) for env, one in zip(envs, action, strict=True)]
        after = [row[0] for row in rows]
        recorder.add(
            _stack(now),
            np.array([row[1] for row in rows], np.float32),
            np.array([row[2] for row in rows]),
            np.array([row[3] for row in rows]),
            _stack(after),
        )
        now = [
            env.reset()[0] if row[2] or row[3] else row[0]
            for env, row in zip(envs, rows, strict=True)
        ]
    for env in envs:
        env.close()
    return recorder.columns()


def assert_same(collected: Mapping[str, Any], direct: Mapping[str, Any]) -> None:
    """Compares all transitions bit for bit."""
    for name in COMPARED:
        _assert_same(collected[name], direct[name], name)


def _assert_same(got: Any, expected: Any, path: str) -> None:
    if isinstance(expected, Mapping):
        assert set(got) == set(expected), path
        for key in expected:
            _assert_same(got[key], expected[key], f"{path}.{key}")
        return
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, (path, got.dtype, expected.dtype)
    assert got.shape == expected.shape, (path, got.shape, expected.shape)
    np.testing.assert_array_equal(got, expected, path)


def _map(function, value):
    if isinstance(value, Mapping):
        return {key: _map(function, child) for key, child in value.items()}
    return function(value)


def _stack(items):
    first = items[0]
    if isinstance(first, Mapping):
        return {key: _stack([item[key] for item in items]) for key in first}
    return np.stack(items)
