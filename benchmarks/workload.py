"""The work every contender does: two trivial envs, one small network, arg max."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

SPACES = {
    "cp": (gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)),
    "img": (gym.spaces.Box(0, 255, (84, 84, 4), np.uint8), gym.spaces.Discrete(6)),
}


class CartPole:
    """N CartPoles: the scalar env for N = 1, gymnasium's vectorised one above."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._env: Any
        if n == 1:
            self._env = gym.make("CartPole-v1").unwrapped
        else:
            self._env = gym.make_vec(
                "CartPole-v1", num_envs=n, vectorization_mode="vector_entry_point"
            )
        observation = self._env.reset(seed=0)[0]
        self.observation = (
            observation[None] if n == 1 else np.ascontiguousarray(observation, np.float32)
        )

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns observation [N, 4], reward [N], terminated [N], truncated [N]."""
        if self.n == 1:
            observation, reward, terminated, truncated, _ = self._env.step(int(action[0]))
            if terminated or truncated:
                observation, _ = self._env.reset()
            return (
                observation[None],
                np.array([reward], np.float32),
                np.array([terminated]),
                np.array([truncated]),
            )
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return (
            np.ascontiguousarray(observation, np.float32),
            reward.astype(np.float32),
            terminated,
            truncated,
        )


class Images:
    """N envs of 84x84x4 uint8 that do nothing but change a pixel."""

    def __init__(self, n: int) -> None:
        self.observation = np.random.default_rng(0).integers(0, 255, (n, 84, 84, 4), np.uint8)
        self._zeros, self._false, self._t = np.zeros(n, np.float32), np.zeros(n, bool), 0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns observation [N, 84, 84, 4], reward [N], terminated [N], truncated [N]."""
        self._t += 1
        self.observation[:, 0, 0, 0] = self._t & 255
        return self.observation, self._zeros, self._false, self._false


def make_env(kind: str, n: int) -> CartPole | Images:
    """`cp` or `img` with N rows."""
    return CartPole(n) if kind == "cp" else Images(n)


def make_network(kind: str) -> Any:
    """The network: 64x64 tanh."""
    import torch

    torch.manual_seed(0)
    inputs, outputs = (196, 6) if kind == "img" else (4, 2)
    layers = [
        torch.nn.Linear(inputs, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, outputs)).eval()


def forward(network: Any, kind: str, observation: Any) -> Any:
    """Arg max of the network for a tensor of observations [N, ...]; int64 [N]."""
    import torch

    if kind == "img":
        observation = observation[:, ::12, ::12].reshape(len(observation), 196).to(torch.float32)
    return network(observation).argmax(1)
