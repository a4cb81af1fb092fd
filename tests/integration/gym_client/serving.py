"""An env server without actors, for tests that drive its envs."""

from __future__ import annotations

from contextlib import contextmanager

from rlightning.rpc.loop import shared_loop
from rlightning.rpc.server import serve
from rlightning.services.env_server.servicer import EnvService
from rlightning.testing import free_address
from rlightning.utils.config import ListenConfig, MainConfig, RpcConfig

# Short enough for tests to wait for, long enough for a busy machine.
FAST = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=5.0, reconnect_initial_ms=10)


class Server:
    """An env server in the loop of this process; may be stopped and started again."""

    def __init__(self, env, services, rpc, upstream):
        sections = {"env": services, **upstream}
        self.config = MainConfig.from_dict({"env": env, "services": sections})
        self.config.services.env.rpc = rpc
        self.rpc = rpc
        self.address = free_address()

    def start(self):
        shared_loop().run(self._start(), 30)

    async def _start(self):
        self.service = EnvService(self.config)
        listen = [ListenConfig(address=self.address)]
        self.server = await serve(self.service, listen=listen, rpc=self.rpc)
        await self.server.ready()

    def stop(self):
        shared_loop().run(self.server.stop(grace_s=2), 10)


def hosted(task="CartPole-v1", **values):
    base = {"name": "env", "backend": "gymnasium", "task": task, "driver": "external"}
    return {**base, **values}


@contextmanager
def env_server(*envs, rpc=FAST, upstream=None, **services):
    server = Server(list(envs), services, rpc, upstream or {})
    server.start()
    try:
        yield server
    finally:
        server.stop()
