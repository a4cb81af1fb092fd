"""An env that is stepped here and stored in the buffer server of a stack, and what should be there of it."""

import asyncio

import numpy as np

from rlightning.buffer.remote_buffer import BufferClient, InsertClient
from rlightning.env.hosting import host_envs
from rlightning.rpc.loop import shared_loop
from rlightning.types import PolicyResponse
from rlightning.utils.config import EnvConfig

ROWS = 2
PATIENCE_S = 90.0


class Ledger:
    """Inserts the transitions of a CartPole of its own until it is stopped.

    Args:
        address: Of the buffer server.
    """

    def __init__(self, address):
        self.address = address
        self.acked = 0
        self._steps = []
        self._stop = asyncio.Event()
        self._writing = shared_loop().submit(self._write())

    async def _write(self):
        env = EnvConfig(
            name="ledger", backend="gymnasium", task="CartPole-v1", num_envs=ROWS, seed=77
        )
        (group,) = await host_envs([env], pipeline_depth=1)
        rng = np.random.default_rng(0)
        try:
            async with InsertClient(self.address, spec=group.meta) as client:
                env_ret = await group.reset()
                while not self._stop.is_set():
                    response = PolicyResponse(group.env_id, action=rng.integers(0, 2, ROWS))
                    response.policy_version = 0
                    await client.insert(env_ret, response)
                    self.acked = client.acked
                    self._steps.append((env_ret.observation.copy(), response.action))
                    env_ret = await group.step(response)
                    await asyncio.sleep(0.02)
                await client.insert(env_ret, None)
                await client.flush(PATIENCE_S)
                assert not client.rebased
        finally:
            await group.close()

    def finish(self):
        """Stops, and returns once all is acked."""
        self._stop.set()
        self._writing.result(PATIENCE_S + 30)

    def check(self, columns):
        """Asserts that all of it is stored once, in order, among what others stored."""
        stored = [row.tobytes() for row in columns["observation"]]
        actions = columns["action"].tolist()
        for row in range(ROWS):
            mine = [(obs[row].tobytes(), int(action[row])) for obs, action in self._steps]
            keys = {observation for observation, _ in mine}
            assert len(keys) == len(mine)
            found = [pair for pair in zip(stored, actions, strict=True) if pair[0] in keys]
            assert found == mine


def read_all(address):
    """Returns the columns of everything that a buffer server holds."""

    async def read():
        async with BufferClient(address) as client:
            return [page async for page in client.pages(20_000)]

    pages = shared_loop().run(read())
    names = ("observation", "next_observation", "action")
    return {name: np.concatenate([page[name] for page in pages]) for name in names}


def check_dynamics(columns):
    """Asserts that each transition is one step of CartPole (Barto, Sutton, Anderson 1983)."""
    x, x_dot, theta, theta_dot = columns["observation"].astype(np.float64).T
    force = np.where(columns["action"] == 1, 10.0, -10.0)
    sin, cos = np.sin(theta), np.cos(theta)
    common = (force + 0.05 * theta_dot**2 * sin) / 1.1
    turn = (9.8 * sin - cos * common) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    push = common - 0.05 * turn * cos / 1.1
    after = np.stack([x + 0.02 * x_dot, x_dot + 0.02 * push, theta + 0.02 * theta_dot])
    expected = np.vstack([after, theta_dot + 0.02 * turn]).T
    np.testing.assert_allclose(columns["next_observation"], expected, atol=1e-5)
