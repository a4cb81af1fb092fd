"""Looking at services over real sockets, while they come and go."""

import asyncio
import json

import pytest

from rlightning.cluster import snapshot, targets
from rlightning.cluster.runs import PROGRESS_FILE
from rlightning.cluster.snapshot import Observer
from rlightning.cluster.targets import Target
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.testing import assert_eventually, free_address
from rlightning.utils.config import ClientAuthConfig, ListenConfig, MainConfig

NOWHERE = "127.0.0.1:1"
ROLLOUTS = {"type": "RolloutBuffer", "rollout_length": 8}


def config(buffer=NOWHERE):
    return MainConfig.from_dict(
        {
            "env": {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 4},
            "buffer": ROLLOUTS,
            "services": {"policy": {"address": NOWHERE}, "buffer": {"address": buffer}},
        }
    )


async def start(service, address="127.0.0.1:0", **listen):
    server = await serve(service, listen=[ListenConfig(address=address, **listen)])
    await server.ready()
    return server


async def test_services_are_known_by_their_address_and_may_come_and_go():
    address = free_address()
    buffer = await start(BufferService(config()), address)
    env = await start(EnvService(config(address)))
    targets = [Target(name, name) for name in (address, env.address, NOWHERE)]
    try:
        async with Observer(targets, timeout_s=10) as observer:
            first = await observer.gather()
            assert [(one.role, one.state) for one in first.services] == [
                ("buffer", "SERVING"),
                ("env", "SERVING"),
                (None, "DOWN"),
            ]
            assert "cannot connect" in first.services[2].error
            assert first.services[1].gauges["rows"] == 4
            assert first.env_steps_per_s is None  # nothing is shown that was not measured
            table = first.services[0].tables["default"]
            assert (table.fill, table.readers) == (0.0, 0)
            json.dumps(first.to_dict(), allow_nan=False)
            second = await observer.gather()
            assert second.env_steps_per_s == 0.0
            assert second.services[0].rates["inserted"] == 0.0

            await buffer.stop(grace_s=0)
            down = (await observer.gather()).services[0]
            assert (down.role, down.state, down.rates) == ("buffer", "DOWN", {})
            buffer = await start(BufferService(config()), address)

            async def is_back():
                return (await observer.gather()).services[0].state == "SERVING"

            await assert_eventually(is_back, 30)
    finally:
        await asyncio.gather(env.stop(grace_s=0), buffer.stop(grace_s=0))


async def test_what_a_token_is_needed_for_is_told_and_the_rest_is_seen(tmp_path):
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("[{name: us, token: secret-of-a-learner, scopes: [learner]}]")
    buffer = await start(BufferService(config()), tokens=str(tokens))
    known = ClientAuthConfig(token="secret-of-a-learner")
    targets = [Target("a", buffer.address), Target("b", buffer.address, auth=known)]
    try:
        async with Observer(targets, timeout_s=10) as observer:
            unknown, known = (await observer.gather()).services
        assert (unknown.role, unknown.state) == ("buffer", "SERVING")
        assert "wants a token" in unknown.error
        assert unknown.tables == {}
        assert known.error is None
        assert set(known.tables) == {"default"}
    finally:
        await buffer.stop(grace_s=0)


async def test_servers_behind_one_name_are_each_looked_at_and_may_become_more(monkeypatch):
    monkeypatch.setattr(snapshot, "_FIND_EVERY_S", 0.0)
    known = []

    async def find(address, *, timeout_s):
        return known or [address]

    monkeypatch.setattr(targets, "find_replicas", find)
    first, second = [await start(BufferService(config())) for _ in range(2)]
    try:
        async with Observer([Target("buffer", first.address)], timeout_s=10) as observer:
            assert [one.name for one in (await observer.gather()).services] == ["buffer"]
            known += [first.address, second.address]
            both = (await observer.gather()).services
            assert [(one.name, one.address, one.state) for one in both] == [
                ("buffer@127.0.0.1", first.address, "SERVING"),
                ("buffer@127.0.0.1", second.address, "SERVING"),
            ]
            known.remove(first.address)
            assert len((await observer.gather()).services) == 1
    finally:
        await asyncio.gather(first.stop(grace_s=0), second.stop(grace_s=0))


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"time": 3, "latencies_s": {}}'])
async def test_a_learner_that_tells_nothing_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / PROGRESS_FILE).write_text(text)
    async with Observer([], run=tmp_path) as observer:
        assert (await observer.gather()).learner is None
