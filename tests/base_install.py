"""What the base install does: envs, clients, an actor and a buffer server, over gRPC and without torch.

Run by `tests.pythons` on several versions of Python, outside of the checkout and with warnings as errors.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading

import gymnasium as gym
import numpy as np

from rlightning.actor import ActorControl, run_actor
from rlightning.buffer.remote_buffer import InsertClient, SampleClient
from rlightning.env.env_server import RemoteEnvServer
from rlightning.env.hosting import host_envs
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.types import EnvRet, Mode, PolicyResponse, Purpose
from rlightning.utils.config import BufferConfig, EnvConfig, MainConfig
from rlightning.wire import decode_env_ret, encode_env_ret


class Alternating:
    """Answers as a policy server would."""

    async def act(
        self, env_ret: EnvRet, *, mode: Mode, purpose: Purpose, reset_state: bool = False
    ) -> PolicyResponse:
        """Pushes the cart to and fro."""
        response = PolicyResponse(env_ret.env_id, action=env_ret.step % 2)
        response.policy_version, response.seq = 1, 1
        return response


async def collect() -> None:
    """Lets an actor fill a buffer server, and takes a rollout from it."""
    buffer = BufferConfig(type="RolloutBuffer", capacity=64, rollout_length=4)
    config = MainConfig(
        env=[EnvConfig(name="cp", backend="gymnasium", task="CartPole-v1", num_envs=3)],
        buffer=buffer,
    )
    server = await serve(BufferService(config))
    await server.ready()
    (group,) = await host_envs(config.env, pipeline_depth=1)
    async with InsertClient(server.address, spec=group.meta) as inserts:
        control = ActorControl()
        actor = asyncio.create_task(run_actor(group, Alternating(), inserts, control=control))
        async with SampleClient(server.address) as samples:
            batch = await samples.next_batch(30)
            assert batch.columns["observation"].shape == (4, 3, 4)
        control.stop()
        actor.cancel()
        await asyncio.gather(actor, return_exceptions=True)
    await group.close()
    await server.stop(grace_s=2)


def attach() -> None:
    """Lets a client bring an env to a server, and steps it there."""
    server = RemoteEnvServer(EnvConfig(name="remote", backend="env_server", task="robot"))
    host, port = server.get_address_port()
    client = RemoteEnvClient(gym.make("CartPole-v1"), host, port, name="robot")
    thread = threading.Thread(target=client.run)
    thread.start()
    server.init()
    (env_ret,) = server.reset()
    for _ in range(20):
        response = PolicyResponse(env_ret.env_id, action=np.array([1]))
        env_ret = server.step(response)
        assert env_ret.observation.shape == (1, 4)
    assert client.status.steps == 20
    client.stop()
    thread.join()
    client.close()
    server.close()


def main() -> None:
    """Fails with whatever does not work."""
    for name in ("rpc", "env", "actor", "buffer", "policy", "cluster", "cluster.train", "cli.app"):
        importlib.import_module(f"rlightning.{name}")
    image = np.arange(3 * 84 * 84, dtype=np.uint8).reshape(3, 84, 84)
    back = decode_env_ret(encode_env_ret(EnvRet("env", {"image": image, "text": "go"}))).cpu()
    assert (np.asarray(back.observation["image"]) == image).all()
    asyncio.run(collect())
    attach()
    heavy = {"torch", "tensordict", "torchrl", "uvloop"} & set(sys.modules)
    assert not heavy, heavy
    print(sys.version.split()[0], "numpy", np.__version__, "ok")


if __name__ == "__main__":
    main()
