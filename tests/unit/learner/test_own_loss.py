"""A policy that brings its loss: where it stands is saved, random numbers included."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.learner import build_learner
from rlightning.learner.state_file import dump_state, load_state
from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig


class Drawing(BasePolicy):
    """Learns by chance: its steps depend on both kinds of random numbers."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.net = nn.Linear(3, 2)
        self.drawn = torch.Generator().manual_seed(5)

    def rollout_step(self, env_ret: Any) -> Any:
        raise NotImplementedError

    def setup_optimizer(self, optim_cfg: Any) -> None:
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=optim_cfg.lr)

    def update_dataset(self, data: Any) -> None:
        self.rows = torch.tensor(data["reward"])

    def train(self) -> dict[str, float]:
        noise = torch.randn(4, 3) + torch.rand(4, 3, generator=self.drawn)
        loss = (self.net(noise) * self.rows.mean()).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": float(loss.detach())}


META = EnvMeta("env", gym.spaces.Discrete(2), gym.spaces.Box(-1.0, 1.0, (3,), np.float32), 4)


def make_config(seed=1, algorithm="policy"):
    return MainConfig.from_dict(
        {
            "policy": {"type": f"{__name__}:Drawing", "seed": seed, "device": "cpu"},
            "learner": {"algorithm": algorithm},
        }
    )


def make_learner(seed=1):
    return build_learner(make_config(seed), META)


COLUMNS = {"reward": np.ones(4, np.float32)}


def test_networks_of_the_user_begin_with_the_weights_of_the_seed():
    torch.manual_seed(0)
    first = make_learner().weights()
    torch.manual_seed(1)
    assert make_learner().weights() == first
    assert make_learner(seed=2).weights() != first


def test_a_learner_goes_on_as_if_nothing_had_happened():
    whole = make_learner()
    for _ in range(2):
        whole.update(COLUMNS)
    saved = dump_state(whole.state())
    torch.manual_seed(99)  # as others in the process may draw
    expected = [whole.update(COLUMNS) for _ in range(3)]
    resumed = make_learner(seed=7)
    resumed.restore(load_state(saved))
    assert [resumed.update(COLUMNS) for _ in range(3)] == expected
    assert resumed.weights() == whole.weights()


def test_other_parts_are_refused():
    learner = make_learner()
    state = learner.state()
    state["parts"]["critic"] = state["parts"].pop("net")
    with pytest.raises(RuntimeError, match=r"expected the parts \['net', 'optimizer'\]"):
        learner.restore(state)
