"""A policy whose answers say what they answer, and with which weights."""

from __future__ import annotations

import time

import torch
from torch import nn

from rlightning.policy import BasePolicy
from rlightning.policy.weights import dump_weights
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from tests.integration.pairing.env import WRONG


class Echo(BasePolicy):
    """Its one weight is the version under which it is published.

    `model_cfg.seconds` is how long an inference takes.
    """

    def construct_network(self, env_meta: EnvMeta, **kwargs: object) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        time.sleep(self.config.model_cfg.get("seconds", 0.0))
        seen = env_ret.observation
        weight = self.net.weight[0].expand(len(seen))
        return PolicyResponse(env_ret.env_id, action=seen[:, :WRONG], echo=seen, weight=weight)


def weights(version: int) -> bytes:
    return dump_weights({"net.weight": torch.full((1, 1), float(version))})
