"""Several env servers behind one name, over real sockets: they come, are counted and steered, and go."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from contextlib import AsyncExitStack

import pytest

from rlightning.buffer.remote_buffer import BufferClient
from rlightning.cluster.env_servers import EnvServers
from rlightning.env.remote_client import EnvClient
from rlightning.errors import UnavailableError
from rlightning.rpc.health import ServingStatus, check_replicas
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.testing import ServerProcess, assert_eventually
from rlightning.utils.config import ListenConfig
from tests.integration.env.test_env_server import main_config

NAME = "env_server"
REPLAY = {"type": "ReplayBuffer", "capacity": 100_000, "auto_truncate_episode": True}


@pytest.fixture
def names(monkeypatch):
    """The numbers that the name server has for `NAME`."""
    numbers = []
    real = asyncio.BaseEventLoop.getaddrinfo

    async def getaddrinfo(self, host, port, **options):
        if host != NAME:
            return await real(self, host, port, **options)
        if not numbers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in numbers]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("rlightning.cluster.env_servers._FIND_EVERY_S", 0.0)
    return numbers


async def running(stack, service, *addresses):
    listen = [ListenConfig(address=address) for address in addresses]
    server = await serve(service, **({"listen": listen} if listen else {}))
    stack.push_async_callback(server.stop, grace_s=5)
    await server.ready()
    return server


def steps_of(service):
    return sum(group.env_steps for group in service._groups)


async def looked(envs, condition):
    await envs.look(5)
    return condition()


async def test_a_name_that_is_not_known_yet_is_looked_up_each_time(names, monkeypatch):
    monkeypatch.setattr("rlightning.cluster.env_servers._FIND_EVERY_S", 60.0)
    section = main_config().services.env.model_copy(update={"address": f"{NAME}:1"})
    envs = EnvServers(section, fresh=False)
    for _ in range(2):
        with pytest.raises(UnavailableError, match=f"the name {NAME} is not known"):
            await envs.look(5)
    names.append("127.0.0.1")
    with pytest.raises(UnavailableError, match="127.0.0.1:1"):
        await envs.look(5)
    await envs.close()


async def test_replicas_join_pause_and_leave_without_loss(names, tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.2", 0))
        port = one.getsockname()[1]
    said, begun_ns = [], time.monotonic_ns()
    async with AsyncExitStack() as stack:
        upstreams = {}
        for name, service in (("policy", PolicyService), ("buffer", BufferService)):
            server = await running(stack, service(main_config(buffer_config=REPLAY)))
            upstreams[name] = server.address
        config = main_config(buffer_config=REPLAY, **upstreams)
        config.services.env.replica = "b"
        config.log.trace_every = 20
        file = tmp_path / "config.yaml"
        file.write_text(config.to_yaml())
        second = ServerProcess(
            [
                "-m",
                "rlightning.services.env_server",
                f"--config={file}",
                f"--listen=127.0.0.3:{port}",
            ],
            tmp_path,
        )
        address = f"{NAME}:{port}"
        section = main_config().services.env.model_copy(update={"address": address})
        envs = EnvServers(section, fresh=False, report=said.append)
        stack.push_async_callback(envs.close)
        config.services.env.replica = "a"
        first = EnvService(config)
        first_server = await running(stack, first, f"127.0.0.2:{port}", f"127.0.0.5:{port}")
        await assert_eventually(lambda: steps_of(first) > 50, 30)
        names.append("127.0.0.2")
        await envs.look(5)
        assert envs.env_steps == 0  # what it did before is not of this run
        await assert_eventually(lambda: looked(envs, lambda: envs.env_steps > 50), 30)
        assert list(envs.stats()) == ["env"]

        # A host of two addresses is one server.
        names.append("127.0.0.5")
        for _ in range(2):
            await envs.look(5)
        assert len(envs.envs) == 2
        assert list(envs.stats()) == ["env"]
        names.remove("127.0.0.2")  # it goes on under the other one
        await assert_eventually(lambda: looked(envs, lambda: envs.envs), 30)
        await envs.look(5)
        assert list(envs.stats()) == ["env"]
        assert 50 < envs.env_steps <= steps_of(first) - 50
        said.clear()

        # One that comes in a pause is paused, too.
        await envs.hold(True, 5)
        stack.enter_context(second)
        names.append("127.0.0.3")
        await assert_eventually(lambda: looked(envs, lambda: said), 60)
        assert said == [f"the env server at 127.0.0.3:{port} has joined with 4 rows"]
        assert sorted(meta.env_id for meta in envs.envs) == [
            *("cart-a-0-0", "cart-a-0-1", "cart-b-0-0", "cart-b-0-1")
        ]
        assert list(envs.stats()) == ["env-0", "env-1"]
        answers = await check_replicas(address, timeout_s=5)
        assert answers == {f"127.0.0.{n}:{port}": ServingStatus.SERVING for n in (3, 5)}
        async with EnvClient(f"127.0.0.3:{port}") as client:

            async def running_there():
                return (await client.describe()).actor_running

            assert not await running_there()
            await envs.hold(False, 5)
            assert await running_there()

        seeds, traces = {}, {}

        def all_ended_one():
            episodes, traced = envs.news()
            seeds.update((episode.env_id, episode.seed) for episode in episodes)
            traces.update((trace.env_id, trace) for trace in traced)
            return len(seeds) == len(traces) == 4

        await assert_eventually(lambda: looked(envs, all_ended_one), 30)
        assert len(set(seeds.values())) == 4  # no two groups play the same
        # Traces of both are by the clock of the first, as far as that of the second is known.
        for env_id, trace in traces.items():
            within_ns = trace.clock_uncertainty_ns
            assert (within_ns > 0) is env_id.startswith("cart-b")
            assert begun_ns - within_ns < trace.start_ns < time.monotonic_ns() + within_ns

        await envs.hold(True, 5)
        await envs.look(5)
        seen = envs.env_steps
        second.terminate()
        assert await asyncio.to_thread(second.wait) == 0
        await envs.look(5)  # the other one answers
        # Not the only thing that was said, where a machine was too busy to answer in time before.
        assert said[-1] == f"the env server at 127.0.0.3:{port} does not answer"
        names.remove("127.0.0.3")
        await envs.look(5)
        assert envs.env_steps == seen  # what it did still counts
        left = re.fullmatch(
            f"the env server at 127.0.0.3:{port} has left after (.*) env steps", said[-1]
        )
        second_steps = int(left[1].replace(",", ""))
        assert second_steps > 50

        await first_server.stop(grace_s=5)
        with pytest.raises(UnavailableError):
            await envs.look(5)
        async with BufferClient(upstreams["buffer"]) as buffer:
            stored = (await buffer.describe()).tables["default"].inserted_total
        assert stored == steps_of(first) + second_steps
