"""A policy server in this loop or as a process, clients for it, and policies that misbehave."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlightning.policy import BasePolicy, PolicyClient, build_policy, policy_weights
from rlightning.policy.weights import dump_weights
from rlightning.rpc.server import RunningServer, serve
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import ListenConfig, MainConfig, PolicyConfig, RpcConfig

FRESH = {"device": "cpu", "seed": 1, "initial_weights": "random"}
VECTOR = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)


@dataclass
class Policies:
    """A running policy server, and what tests look into."""

    server: RunningServer
    service: PolicyService

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def stats(self) -> Any:
        assert self.service._hosts is not None
        return self.service._hosts.default.batcher.stats


@asynccontextmanager
async def policy_server(
    *, rpc: RpcConfig | None = None, wait: bool = True, **policy: Any
) -> AsyncIterator[Policies]:
    config = MainConfig(policy=PolicyConfig(**{**FRESH, **policy}))
    config.services.policy.rpc = rpc or RpcConfig()
    service = PolicyService(config)
    server = await serve(service, listen=[ListenConfig()], rpc=config.services.policy.rpc)
    try:
        if wait:
            await server.ready()
        yield Policies(server, service)
    finally:
        await server.stop(grace_s=5)


def spec(rows: int = 1, observation: Any = VECTOR) -> EnvMeta:
    return EnvMeta("env", gym.spaces.Discrete(2), observation, rows)


def env_ret(rows: int = 1, *, seed: int = 0, env_id: str = "env") -> EnvRet:
    rng = np.random.default_rng(seed)
    zeros = np.zeros(rows, bool)
    observation = rng.standard_normal((rows, 4), np.float32)
    return EnvRet(env_id, observation, np.zeros(rows, np.float32), zeros, zeros)


def weights(seed: int = 0, **config: Any) -> bytes:
    policy = build_policy(PolicyConfig(device="cpu", seed=seed, **config), "train")
    policy.init_train(env_meta=spec())
    return dump_weights(policy_weights(policy))


@asynccontextmanager
async def acting(address: str, rows: int = 1, **options: Any) -> AsyncIterator[PolicyClient]:
    async with PolicyClient(address, **{"spec": spec(rows), **options}) as client:
        yield client


class Awkward(BasePolicy):
    """Raises for an observation above 100; sleeps for that many seconds between 0 and 100."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.net = nn.Linear(4, 1)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        most = float(env_ret.observation.max())
        if most > 100:
            raise ValueError("the arm is on fire")
        if most > 0:
            time.sleep(most)
        return PolicyResponse(env_ret.env_id, action=env_ret.observation[:, 0])


class Large(BasePolicy):
    """More than 64 MB of weights; answers with as many floats as the observation says."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.net = nn.Embedding(17, 2**20)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        observation = env_ret.observation.flatten(1)
        size = 4 * max(0, int(observation[0, 1]))
        big = torch.zeros(len(observation), size)
        return PolicyResponse(env_ret.env_id, action=observation[:, 0], big=big)
