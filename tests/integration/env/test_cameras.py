"""Envs whose pictures travel as PNG or JPEG, on real servers and real sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import gymnasium as gym
import numpy as np
import pytest
from grpc.aio import AioRpcError

from rlightning.env.attached import AttachedGroup
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.env.utils.pictures import encode_picture
from rlightning.errors import ConfigError, PreconditionError
from rlightning.policy import BasePolicy
from rlightning.rpc.channel import connect
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.v1 import env_service_pb2 as pb
from tests.integration.env.attaching import (
    FAST,
    PATIENCE_S,
    Cluster,
    RawClient,
    attached,
    raw_client,
    stepped,
)

pytestmark = pytest.mark.timeout(120)

SHAPE = (24, 32, 3)


def scene(number, shape=SHAPE):
    """The picture of a step: smooth, and another one each time."""
    return (np.indices(shape).sum(0) + number % 100).astype(np.uint8)


class Seeing(gym.Env):
    """Shows the number of its step, and a picture of it from each of three cameras."""

    length = 5
    image = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    observation_space = gym.spaces.Dict(
        {
            "number": gym.spaces.Box(0, 2**40, (1,), np.int64),
            "plain": image,
            "top": image,
            "wrist": image,
        }
    )
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.number = 0

    def _seen(self):
        image = scene(self.number)
        return {
            "number": np.array([self.number]),
            "plain": image,
            "top": image,
            "wrist": image,
        }

    def reset(self, *, seed=None, options=None):
        self.number += 1
        return self._seen(), {}

    def step(self, action):
        self.number += 1
        return self._seen(), 1.0, False, self.number % self.length == 0, {}


class Endless(Seeing):
    """Its only episode does not end, or it would wait for the first answer of the next."""

    length = 2**40


class Blind(BasePolicy):
    """Does always the same, and notes what it was told of the env."""

    def construct_network(self, env_meta, **kwargs):
        import torch

        self.lossy = env_meta.lossy
        self.net = torch.nn.Linear(1, 1)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        import torch

        seen = env_ret.observation
        assert seen["top"].dtype == torch.uint8
        return PolicyResponse(
            env_ret.env_id, action=torch.zeros(len(seen["number"]), dtype=torch.int64)
        )


@asynccontextmanager
async def cluster():
    async with AsyncExitStack() as stack:
        running = Cluster(stack, [], {"type": f"{__name__}:Blind"}, FAST)
        running.config.services.env.min_clients = 1
        await running.start()
        yield running


async def stored(running):
    await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
    return await running.buffer.get()


@pytest.mark.parametrize("control", [{}, {"control_hz": 50}], ids=["asked", "paced"])
async def test_the_buffer_gets_the_pixels_of_every_step(control):
    cameras = {"top": "png", "wrist": "jpeg:90@16x12"}
    async with cluster() as running:
        async with attached(running.env_address, Seeing(), cameras=cameras, **control) as client:
            await stepped(client, 20)
            [meta] = (await running.client.describe()).envs
            host = running.policy._hosts.by_name["default"]
            [writer] = running.stores._writers.sessions
            assert writer.spec.env_id == meta.env_id
            for told in (meta, host.meta, host._policy, writer.spec):
                assert told.lossy == ("wrist",)
            for told in (meta, host.meta, writer.spec):
                assert told.observation_space["wrist"].shape == (12, 16, 3)
        columns = await stored(running)
    observation, after = columns["observation"], columns["next_observation"]
    assert len(observation["number"]) >= 15
    for part, offset in ((observation, 0), (after, 1)):
        for row, number in enumerate(observation["number"][:, 0].tolist()):
            # The last observation of an episode is its own, not the first one of the next.
            expected = scene(number + offset)
            np.testing.assert_array_equal(part["plain"][row], expected)
            np.testing.assert_array_equal(part["top"][row], expected)
            small = expected[::2, ::2].astype(int)
            assert part["wrist"][row].shape == (12, 16, 3)
            assert np.median(np.abs(part["wrist"][row] - small)) < 8


async def test_a_spool_of_encoded_steps_outlives_a_cut():
    async with cluster() as running, FaultProxy(running.env_address) as proxy:
        async with attached(
            proxy.address,
            Endless(),
            cameras=dict.fromkeys(("plain", "top", "wrist"), "png"),
            control_hz=50,
            spool_mb=0.2,
        ) as client:
            await stepped(client, 10)
            proxy.black_hole()
            await stepped(client, 60)
            # As they come from the env they would take more than there is room for.
            assert client.status.control.dropped == 0
            proxy.restore()
            await assert_eventually(lambda: client.status.control.spooled < 5, PATIENCE_S)
            await stepped(client, 10)
        columns = await stored(running)
    numbers = np.sort(columns["observation"]["number"][:, 0])
    assert len(set(numbers)) == len(numbers) >= 60
    for number, top in zip(
        columns["observation"]["number"][:, 0], columns["observation"]["top"], strict=True
    ):
        np.testing.assert_array_equal(top, scene(number))


async def test_a_broken_picture_ends_the_session_with_its_name():
    spec = EnvMeta(None, Seeing.action_space, Seeing.observation_space, 1)
    camera = pb.CameraEncoding(path=["wrist"], format=pb.PICTURE_FORMAT_JPEG)
    seen = {name: value[None] for name, value in Seeing()._seen().items()}
    whole = encode_picture(scene(1), "jpeg", 80)
    for wrist, expected in (
        ([whole[:300]], "step 1: observation.wrist: no valid JPEG"),
        (
            [encode_picture(scene(1, (48, 64, 3)), "jpeg", 80)],
            "observation.wrist: expected a JPEG of 32x24",
        ),
        (seen["wrist"], "observation.wrist: expected a list of 1 encoded"),
    ):
        async with cluster() as running, raw_client(running, spec=spec, cameras=[camera]) as client:
            client.env_ret = EnvRet("raw", {**seen, "wrist": wrist})
            await client.send((1, True))
            assert (await client.call.code()).name == "INVALID_ARGUMENT"
            assert expected in await client.call.details()


async def test_pixels_beyond_the_cap_of_messages_are_refused_at_once():
    image = gym.spaces.Box(0, 255, (1024, 1024, 3), np.uint8)
    spec = EnvMeta(None, Seeing.action_space, image, 256)
    camera = pb.CameraEncoding(format=pb.PICTURE_FORMAT_PNG)
    async with cluster() as running, connect(running.env_address, rpc=FAST) as channel:
        client = RawClient(channel.stream_stream("/rlightning.v1.EnvService/Attach")())
        with pytest.raises(AioRpcError, match="the pixels of 256 rows take 805306368 bytes"):
            await client.hello(spec=spec, cameras=[camera])


async def test_a_client_with_pictures_has_as_many_steps_waiting_as_fit(monkeypatch):
    monkeypatch.setattr("rlightning.env.attached._MAX_WAITING", 10)
    monkeypatch.setattr(
        "rlightning.env.attached._MAX_PIXELS", 3 * 24 * 32 * 3 / FAST.max_message_bytes
    )
    image = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    spec = EnvMeta(None, Seeing.action_space, image, 1)
    camera = pb.CameraEncoding(format=pb.PICTURE_FORMAT_PNG)
    async with AsyncExitStack() as stack:
        running = Cluster(stack, [], {"type": f"{__name__}:Blind"}, FAST)
        running.config.services.env.attached_driver = "external"
        running.config.services.env.min_clients = 1
        await running.start()
        async with raw_client(running, spec=spec, cameras=[camera]) as client:
            client.env_ret = EnvRet("raw", [encode_picture(scene(1), "png", 1)])
            await client.send(*((seq, False) for seq in range(1, 9)))
            group = running.service._attached.groups["raw"]
            await assert_eventually(lambda: len(group._inbox) >= 3, PATIENCE_S)
            await asyncio.sleep(0.2)
            assert len(group._inbox) == 3


async def test_what_cannot_be_is_said_at_once(monkeypatch):
    with pytest.raises(ConfigError, match="camera 'top': expected CODEC"):
        RemoteEnvClient(Seeing(), "127.0.0.1", 1, cameras={"top": "gif"})
    async with cluster() as running:
        monkeypatch.setattr(AttachedGroup, "decodes_cameras", False)  # as a server of old
        async with attached(running.env_address, Seeing(), cameras={"top": "png"}) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], PreconditionError)
            assert "decodes no cameras" in str(client.outcome[0])
