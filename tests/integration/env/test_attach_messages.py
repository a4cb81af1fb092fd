"""What attaching clients, and what they dial, say when something does not fit."""

from __future__ import annotations

import logging

import gymnasium as gym
import numpy as np
import pytest

from rlightning.cluster.attach import _line
from rlightning.env.base_env import BaseEnv
from rlightning.env.remote_client import EnvClient
from rlightning.env.step_client import StepClient
from rlightning.errors import CodecError, PreconditionError, RemoteError
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.testing import assert_eventually
from rlightning.types import EnvRet
from rlightning.utils.config import EnvConfig, MainConfig
from tests.integration.env.attaching import (
    PATIENCE_S,
    attached,
    cluster,
    raw_client,
    stepped,
)
from tests.integration.pairing.env import Counting

pytestmark = pytest.mark.timeout(120)


async def test_dialling_another_service_names_both():
    server = await serve(BufferService(MainConfig()))
    try:
        await server.ready()
        both = "expected rlightning.v1.EnvService with {}; this server is rlightning.v1.BufferS"
        async with attached(server.address, Counting()) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert both.format("Attach") in str(client.outcome[0])
        async with EnvClient(server.address) as client:
            with pytest.raises(RemoteError, match=both.format("Describe")):
                await client.describe()
        client = StepClient(server.address)
        with pytest.raises(RemoteError, match=both.format("Step")):
            await client.start()
        await client.close()
    finally:
        await server.stop(grace_s=2)


async def test_the_status_tells_why_it_connects_still_and_that_it_has_ended():
    async with attached("127.0.0.1:1", Counting(), connect_timeout_s=2.0) as client:
        await assert_eventually(lambda: client.status.trouble != "", PATIENCE_S)
        assert client.status.state == "connecting"
        assert "127.0.0.1:1: cannot connect: connection refused" in _line(client.status)
        await assert_eventually(lambda: client.outcome, PATIENCE_S)
        assert client.status.state == "ended"
        assert _line(client.status).startswith("ended ")
        assert client.status.trouble == ""


async def test_a_refusal_is_told_once(caplog):
    async with cluster() as running:
        with caplog.at_level(logging.WARNING):
            async with attached(running.env_address, gym.make("CartPole-v1")) as client:
                await assert_eventually(lambda: client.outcome, PATIENCE_S)
        assert isinstance(client.outcome[0], PreconditionError)
        assert "the env differs" not in caplog.text


class Extra(BaseEnv):
    """Has an extra field with the name of one of EnvRet."""

    def __init__(self):
        super().__init__(EnvConfig(name="extra", backend="x:Extra", task="extra"))
        self.env = Counting()

    def reset(self):
        return EnvRet(self.env_id, self.env.reset()[0], _extra={"observation": 1})

    def step(self, policy_resp):
        raise NotImplementedError


async def test_an_extra_field_named_like_another_is_refused_at_both_ends(monkeypatch):
    async with cluster() as running:
        async with attached(running.env_address, Extra()) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], CodecError)
            assert "extra: fields of EnvRet have these names: observation" in str(client.outcome[0])
        async with raw_client(running) as client:
            client.env_ret._extra = {"info": 1}
            with monkeypatch.context() as patch:  # as another implementation might send it
                patch.setattr("rlightning.wire.env_ret._check_extra", lambda env_ret: None)
                await client.send((1, True))
            assert (await client.call.code()).name == "INVALID_ARGUMENT"
            assert "extra" in await client.call.details()


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
async def test_another_dtype_is_refused_where_it_arrives(dtype):
    async with cluster() as running, raw_client(running) as client:
        client.env_ret.observation = client.env_ret.observation.astype(dtype)
        await client.send((1, True))
        assert (await client.call.code()).name == "INVALID_ARGUMENT"
        expected = f"observation: expected int64[1, 4], got {np.dtype(dtype)}[1, 4]"
        assert expected in await client.call.details()
        async with attached(running.env_address, Counting()) as other:
            await stepped(other, 5)
