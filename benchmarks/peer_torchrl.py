"""TorchRL's inference server, in a process of its own, asked from this one; jobs come as JSON lines on stdin."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules.inference_server import InferenceServer

from benchmarks.harness import answer_jobs
from benchmarks.workload import SPACES, forward, make_env, make_network

Answer = dict[str, Any]


class Network(torch.nn.Module):
    """The network and its arg max, for a batch of requests of the same rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.network = make_network(kind)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        requests, rows = observation.shape[:2]
        action = forward(self.network, self.kind, observation.flatten(0, 1))
        return torch.as_tensor(action).view(requests, rows)


def make_policy(kind: str) -> TensorDictModule:
    """Makes the policy in the process of the server."""
    torch.set_num_threads(1)
    return TensorDictModule(Network(kind), in_keys=["observation"], out_keys=["action"])


def request_of(observation: np.ndarray) -> TensorDict:
    return TensorDict({"observation": torch.from_numpy(observation)})


_servers: dict[tuple[str, int, int], list[Any]] = {}


def clients_of(kind: str, n: int, count: int) -> list[Any]:
    """Returns clients of a server for requests of `n` rows; starts it the first time."""
    key = kind, n, count
    if key not in _servers:
        space = SPACES[kind][0]
        observation = torch.from_numpy(np.zeros((n, *(space.shape or ())), space.dtype))
        action = torch.zeros(n, dtype=torch.int64)
        version = torch.zeros((), dtype=torch.int64)
        server = InferenceServer(
            policy_factory=partial(make_policy, kind),
            service_backend="process",
            transport="process_slot",
            request_spec=TensorDict({"observation": observation}),
            response_spec=TensorDict({"action": action, "policy_version": version}),
            num_clients=count,
            max_batch_size=max(1, count),
            collect_stats=False,
        )
        server.start()
        _servers[key] = [server, *server.clients(count)]
    return _servers[key][1:]


async def loop(job: Answer) -> Answer:
    """One group of N rows: env, policy, env; env steps per second."""
    (client,) = clients_of(job["kind"], job["n"], 1)
    env, steps = make_env(job["kind"], job["n"]), 0
    with torch.inference_mode():
        for _ in range(5):
            client(request_of(env.observation))
        start = time.perf_counter()
        while time.perf_counter() - start < job["seconds"]:
            action = client(request_of(env.observation))["action"].numpy()
            env.observation = env.step(action)[0]
            steps += job["n"]
        return {"steps_per_s": steps / (time.perf_counter() - start)}


async def sessions(job: Answer) -> Answer:
    """Clients of one row each, which all ask at once, again and again; answers per second."""
    clients = clients_of("cp", 1, job["sessions"])
    requests = [request_of(np.zeros((1, 4), np.float32)) for _ in clients]
    answers = 0
    with torch.inference_mode():
        start = time.perf_counter()
        while time.perf_counter() - start < job["seconds"]:
            asked = [one.submit(request) for one, request in zip(clients, requests, strict=True)]
            for future in asked:
                future.result()
            answers += len(asked)
        return {"per_s": answers / (time.perf_counter() - start)}


def main() -> None:
    torch.set_num_threads(1)
    try:
        asyncio.run(answer_jobs({"loop": loop, "sessions": sessions}))
    finally:
        for server, *_ in _servers.values():
            server.shutdown()


if __name__ == "__main__":
    main()
