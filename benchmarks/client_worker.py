"""Attaches envs for `benchmarks.prove_clients`: `python -m benchmarks.client_worker ADDRESS`."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness import answer_jobs
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.errors import ResourceExhaustedError


class Waiting(gym.Env[Any, Any]):
    """Takes its time for each step, as a robot does; episodes of ten steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds)
        self._steps += 1
        return np.zeros(4, np.float32), 1.0, False, self._steps == 10, {}


def first_slower(folder: str, first_s: float, seconds: float) -> Waiting:
    """Makes an env whose steps take `first_s` if it is the first in a folder, else `seconds`."""
    try:
        Path(folder, "first").touch(exist_ok=False)
    except FileExistsError:
        return Waiting(seconds)
    return Waiting(first_s)


class Clients:
    """The clients of this process, each in a thread."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._clients: dict[str, RemoteEnvClient] = {}

    async def attach(self, job: dict[str, Any]) -> dict[str, Any]:
        """Attaches an env under each of `names`, with steps of `seconds`; returns at once."""
        for name in job["names"]:
            env, port = Waiting(job["seconds"]), int(self._port)
            client = RemoteEnvClient(env, self._host, port, name=name, connect_timeout_s=120.0)
            self._clients[name] = client
            threading.Thread(target=_run, args=(client,), daemon=True).start()
        return {}

    async def steps(self, job: dict[str, Any]) -> dict[str, Any]:
        """Tells how many steps each has done."""
        return {name: client.status.steps for name, client in self._clients.items()}


def _run(client: RemoteEnvClient) -> None:
    while True:
        try:
            client.run()
            return
        except ResourceExhaustedError:  # the server is full: somebody's lease has to end first
            time.sleep(0.1)


if __name__ == "__main__":
    clients = Clients(sys.argv[1])
    asyncio.run(answer_jobs({"attach": clients.attach, "steps": clients.steps}))
