"""What `train` does with services that others started, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from rlightning.cluster.remote import RemoteBackend
from rlightning.testing import FaultProxy
from rlightning.utils.config import MainConfig
from tests.integration.buffer.harness import act, buffer_server, inserting
from tests.unit.buffer.scripted import ScriptedEnv


async def test_a_learner_reaches_a_buffer_behind_a_slow_line() -> None:
    """The first answer takes several round trips, longer than a look at whether all are there."""
    env = ScriptedEnv(2)

    def learn(launcher: Any) -> int:
        with RemoteBackend(launcher) as backend:
            columns = backend.next_batch(10)
            assert columns is not None
            return len(columns["reward"])

    async with (
        buffer_server() as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(buffers.address, env.meta) as client,
    ):
        await act(client, env, 8)
        proxy.delay_s = 0.3
        config = MainConfig()
        config.services.buffer.address = proxy.address
        for unused in (config.services.env, config.services.policy):
            unused.listen[0].address = "127.0.0.1:1"
        launcher = SimpleNamespace(
            config=config,
            hosts_envs=True,
            check=lambda: None,
            waiting=False,
            failed=threading.Event(),
        )
        assert await asyncio.to_thread(learn, launcher) == 8
