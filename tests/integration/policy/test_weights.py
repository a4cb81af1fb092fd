"""Weights over the network: publish, pull, versions, restarts."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from google.protobuf.message import Message

from rlightning.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.policy import PolicyClient, WeightPublisher, build_policy, policy_weights, transfer
from rlightning.policy.weights import dump_weights, parse_weights
from rlightning.rpc.channel import connect, stream_unary
from rlightning.rpc.health import ServingStatus, check
from rlightning.testing import FaultProxy, ServerProcess, free_address
from rlightning.testing.waiting import assert_eventually
from rlightning.types import EnvRet
from rlightning.utils.config import PolicyConfig, RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.policy.harness import acting, env_ret, policy_server, spec, weights

LARGE = "tests.integration.policy.harness:Large"


async def test_published_weights_act_and_come_back() -> None:
    async with policy_server() as server, acting(server.address) as client:
        with pytest.raises(NotFoundError, match="no weights were published"):
            await client.pull_weights()
        for version in (1, 5):
            data = weights(seed=version)
            assert await client.publish_weights(version, data) == version
            assert (await client.act(env_ret())).policy_version == version
            assert await client.pull_weights(version) == (version, data)
        assert await client.publish_weights(5, weights(seed=5)) == 5  # the same again
        with pytest.raises(PreconditionError, match="version 5 is in use"):
            await client.publish_weights(4, weights(seed=4))
        assert (await client.describe()).policy_version == 5


@pytest.mark.parametrize("version", [-1, 0, 2**62 + 1, 2**63 - 1])
async def test_a_version_that_leaves_no_room_for_the_next_is_refused(version: int) -> None:
    async with policy_server() as server, PolicyClient(server.address) as client:
        with pytest.raises(InvalidRequestError, match="versions count from 1 to"):
            await client.publish_weights(version, weights())
        assert await client.publish_weights(2**62, weights()) == 2**62


async def test_newer_weights_are_watched_for_and_skipped_ones_are_not_fetched() -> None:
    async with policy_server() as server, PolicyClient(server.address) as client:
        await client.publish_weights(1, weights(seed=1))
        watching = client.watch_weights()
        assert await anext(watching) == (1, weights(seed=1))
        newer = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0.05)
        assert not newer.done()
        await client.publish_weights(3, weights(seed=3))
        assert await newer == (3, weights(seed=3))
        for version in (4, 5):
            await client.publish_weights(version, weights(seed=version))
        assert (await anext(watching))[0] == 5


async def test_weights_may_come_before_the_first_session() -> None:
    async with policy_server() as server:
        async with PolicyClient(server.address) as learner:
            await learner.publish_weights(3, weights())
        async with acting(server.address) as client:
            assert (await client.act(env_ret())).policy_version == 3


async def test_weights_of_another_shape_are_refused_and_the_old_ones_act_on() -> None:
    wrong = weights(model_cfg={"hidden": [16], "activation": "tanh"})
    async with policy_server() as server, acting(server.address) as client:
        await client.publish_weights(1, weights())
        with pytest.raises(
            InvalidRequestError,
            match=r"actor.1.weight: expected float32\[64, 4\], got float32\[16, 4\]",
        ):
            await client.publish_weights(2, wrong)
        assert (await client.act(env_ret())).policy_version == 1


async def test_weights_that_are_no_numbers_are_refused() -> None:
    broken = {name: torch.full_like(t, torch.nan) for name, t in parse_weights(weights()).items()}
    async with policy_server() as server, acting(server.address) as client:
        with pytest.raises(InvalidRequestError, match="NaN"):
            await client.publish_weights(1, dump_weights(broken))
        assert (await client.act(env_ret())).policy_version == 0


async def test_more_than_64_mb_pass_with_the_defaults() -> None:
    async with policy_server(type=LARGE) as server, acting(server.address) as client:
        data = weights(type=LARGE)
        assert len(data) > 64 * 2**20
        await client.publish_weights(1, data)
        assert (await client.act(env_ret())).policy_version == 1
        assert await client.pull_weights() == (1, data)


@pytest.mark.parametrize(
    ("header", "chunks", "message"),
    [
        (None, [b"x"], "the first message must be the header"),
        ({"total_bytes": 4}, [b"abc"], r"3 of 4 bytes came"),
        ({"total_bytes": 4}, [b"abc", b"de"], "expected chunks of 4 bytes in all"),
        (
            {"total_bytes": 3, "sha256": bytes(32)},
            [b"abc"],
            "with SHA-256 ba7816bf.*, expected 0000",
        ),
        ({"total_bytes": 3}, [b"abc"], "not a safetensors file"),
    ],
)
async def test_a_stream_that_is_not_what_it_says_is_refused(
    header: dict[str, Any] | None, chunks: list[bytes], message: str
) -> None:
    async def requests() -> AsyncIterator[Message]:
        if header is not None:
            digest = hashlib.sha256(b"".join(chunks)).digest()
            full = {"policy_version": 1, "sha256": digest, **header}
            yield pb.PublishWeightsRequest(header=pb.WeightsHeader(**full))
        for chunk in chunks:
            yield pb.PublishWeightsRequest(chunk=chunk)

    async with policy_server() as server, connect(server.address) as channel:
        with pytest.raises(InvalidRequestError, match=message):
            await stream_unary(
                channel,
                "/rlightning.v1.PolicyService/PublishWeights",
                requests(),
                pb.PublishWeightsResponse,
                timeout=10,
            )


async def test_weights_that_come_several_times_at_once_share_the_cap() -> None:
    data = weights()

    async def stalls() -> AsyncIterator[Message]:
        header = pb.WeightsHeader(total_bytes=len(data), learner_id="learner")
        yield pb.PublishWeightsRequest(header=header)
        yield pb.PublishWeightsRequest(chunk=data[:-1])
        await asyncio.sleep(60)

    async with policy_server(max_weights_bytes=len(data)) as server:
        async with connect(server.address) as channel, PolicyClient(server.address) as learner:
            method = "/rlightning.v1.PolicyService/PublishWeights"
            response_type = pb.PublishWeightsResponse
            stalled = asyncio.create_task(
                stream_unary(channel, method, stalls(), response_type, timeout=60)
            )
            await assert_eventually(lambda: server.service._uploaded == len(data) - 1)
            with pytest.raises(ResourceExhaustedError, match="several learners"):
                await learner.publish_weights(1, data)
            stalled.cancel()
            await assert_eventually(lambda: server.service._uploaded == 0)
            assert await learner.publish_weights(1, data) == 1


async def test_weights_past_their_cap_are_refused_before_they_are_read() -> None:
    async with policy_server(max_weights_bytes=1000) as server:
        async with PolicyClient(server.address) as client:
            with pytest.raises(
                ResourceExhaustedError, match="policy.max_weights_bytes.*allows 1000"
            ):
                await client.publish_weights(1, weights())


async def test_a_session_waits_for_the_version_it_needs_and_no_longer_than_that() -> None:
    rpc = RpcConfig(lease_s=1.0, heartbeat_s=0.2)
    async with policy_server(rpc=rpc) as server, PolicyClient(server.address) as learner:
        with pytest.raises(PreconditionError, match="version 2 of the weights was asked for, 0 is"):
            await learner.pull_weights(2, timeout_s=0.5)
        await learner.publish_weights(1, weights(seed=1))
        client = PolicyClient(server.address, spec=spec())
        client._version = 2  # as if it had been answered by it
        opening = asyncio.ensure_future(client.start())
        pulling = asyncio.ensure_future(learner.pull_weights(2))
        await asyncio.sleep(0.1)
        assert not opening.done()
        assert not pulling.done()
        await learner.publish_weights(2, weights(seed=2))
        await opening
        assert (await pulling)[0] == 2
        assert (await client.act(env_ret())).policy_version == 2
        await client.close()
        late = PolicyClient(server.address, spec=spec())
        late._version = 3
        with pytest.raises(UnavailableError, match="version 3 .* was asked for, 2 is in use"):
            await late.start(timeout_s=1.5)
        await late.close()


async def test_without_initial_weights_the_server_is_ready_with_the_first_publish() -> None:
    async with policy_server(initial_weights="none", wait=False) as server:
        async with PolicyClient(server.address) as learner:
            assert (await learner.describe()).policy_version == 0
            assert await check(server.address, "readiness") is ServingStatus.NOT_SERVING
            await learner.publish_weights(1, weights())
            await server.server.ready()
            assert await check(server.address, "readiness") is ServingStatus.SERVING
        async with acting(server.address) as client:
            assert (await client.act(env_ret())).policy_version == 1


async def test_a_publisher_skips_what_is_superseded_and_tells_what_was_refused() -> None:
    async with policy_server() as server, PolicyClient(server.address) as client:
        publisher = WeightPublisher(client)
        publisher.start()
        for version in range(1, 30):
            publisher.offer(version, weights(seed=version))
        await publisher.publish(30, weights(seed=30))
        assert (await client.describe()).policy_version == 30
        with pytest.raises(InvalidRequestError, match="not a safetensors file"):
            await publisher.publish(31, b"garbage")
        with pytest.raises(InvalidRequestError, match="not a safetensors file"):
            publisher.offer(32, weights())
        await publisher.close()


async def test_an_attempt_that_newer_weights_overtake_is_no_failure() -> None:
    """A replica that comes back has them from another one before an old attempt reaches it."""
    async with policy_server() as server, PolicyClient(server.address) as client:
        publisher = WeightPublisher(client)
        publish, newer = client.publish_weights, weights(seed=2)

        async def overtaken(version: int, data: bytes, **options: Any) -> int:
            if version == 1:
                publisher.offer(2, newer)
                await publish(2, newer)
            return await publish(version, data, **options)

        client.publish_weights = overtaken  # type: ignore[method-assign]
        publisher.start()
        await publisher.publish(1, weights(seed=1))
        assert publisher.acked == 2
        client.publish_weights = publish  # type: ignore[method-assign]
        publisher.offer(1, weights(seed=1))  # not overtaken, but older
        await assert_eventually(lambda: publisher._failure is not None)
        with pytest.raises(PreconditionError, match="version 2 is in use"):
            publisher.raise_failure()
        await publisher.close()


async def test_large_weights_get_through_a_slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that is given up begins again from nothing, so it must be given its time."""
    monkeypatch.setattr(transfer, "_TIMEOUT_S", 0.5)
    data = dump_weights({"w": torch.zeros(150_000)})
    async with (
        policy_server() as server,
        FaultProxy(server.address) as proxy,
        PolicyClient(proxy.address) as client,
    ):
        proxy.bytes_per_s = 300_000
        publisher = WeightPublisher(client)
        publisher.start()
        await publisher.publish(1, data, timeout_s=15)
        await publisher.close()
        assert proxy.accepted == 1


async def test_a_server_that_cannot_be_reached_is_named_in_time() -> None:
    async with PolicyClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"127.0.0.1:1: cannot connect"):
            await client.describe(timeout_s=0.5)
        publisher = WeightPublisher(client)
        publisher.start()
        with pytest.raises(DeadlineExceededError, match="version 1 is not in use after 0.3 s"):
            await publisher.publish(1, weights(), timeout_s=0.3)
        await publisher.close()


class Process(ServerProcess):
    """A policy server that is started again on the port it had."""

    def __init__(self, folder: Path, config: str) -> None:
        config_file = folder / "config.yaml"
        config_file.write_text(config)
        command = ["-m", "rlightning.services.policy_server", "--config", str(config_file)]
        super().__init__([*command, "--listen", free_address()], folder)

    def restart(self) -> None:
        self.kill()
        self.start()


@pytest.mark.crash
@pytest.mark.parametrize("keeps", [False, True], ids=["without state_dir", "with state_dir"])
async def test_after_kill_9_sessions_go_on_and_versions_never_fall(
    tmp_path: Path, keeps: bool
) -> None:
    config = "policy: {device: cpu, initial_weights: random}\n"
    if keeps:
        config = (
            f"policy: {{device: cpu, initial_weights: random, state_dir: {tmp_path / 'state'}}}\n"
        )
    with Process(tmp_path, config) as process:
        address = await asyncio.to_thread(process.address)
        async with PolicyClient(address) as learner, acting(address, 4) as client:
            publisher = WeightPublisher(learner, watch_s=0.2)
            if keeps:
                await learner.publish_weights(7, weights(seed=7))
            else:
                publisher.start()
                await publisher.publish(7, weights(seed=7))
            expected = await client.act(env_ret(4))
            assert expected.policy_version == 7
            for _ in range(2):
                acts = asyncio.ensure_future(_act(client, 200))
                await asyncio.to_thread(process.restart)
                versions = await asyncio.wait_for(acts, 40)
                assert set(versions) == {7}
            again = await client.act(env_ret(4))
            np.testing.assert_allclose(again.value, expected.value, atol=1e-5)
            await publisher.close()


async def _act(client: PolicyClient, times: int) -> list[int]:
    # Paced, so that the restart falls into it.
    versions = []
    for _ in range(times):
        versions.append((await client.act(env_ret(4))).policy_version)
        await asyncio.sleep(0.002)
    return versions


async def test_sigterm_answers_what_was_asked_and_ends_with_0(tmp_path: Path) -> None:
    config = "policy: {device: cpu, initial_weights: random, inline_below_us: 0, type: 'tests.integration.policy.harness:Awkward'}\n"
    with Process(tmp_path, config) as process:
        address = await asyncio.to_thread(process.address)
        async with acting(address) as client:
            answer = env_ret()
            answer.observation[:] = 0.5
            asked = asyncio.ensure_future(client.act(answer))
            await asyncio.sleep(0.1)
            process.terminate()
            assert (await asked).action.tolist() == [0.5]
            assert await asyncio.to_thread(process.wait) == 0


async def test_the_running_server_imports_torch_and_no_more(tmp_path: Path) -> None:
    with Process(tmp_path, "policy: {device: cpu, initial_weights: random}\n") as process:
        address = await asyncio.to_thread(process.address)
        async with acting(address) as client:
            await client.act(env_ret())
        maps = Path(f"/proc/{process.child.pid}/maps").read_text()
        assert "libtorch_cpu" in maps
        assert "tensordict" not in maps


async def test_weights_change_20_times_a_second_under_load() -> None:
    """No request fails, no answer mixes two versions, none falls, and new ones act at once."""
    kind = "tests.unit.policy.policies:Versioned"
    space = gym.spaces.Box(-1, 1, (1,), np.float32)
    policy = build_policy(PolicyConfig(device="cpu", type=kind), "train")
    policy.init_train(env_meta=spec(1, space))
    names = policy_weights(policy)
    done = asyncio.Event()

    async def act(client: PolicyClient) -> int:
        last = 0
        while not done.is_set():
            response = await client.act(EnvRet("a", np.zeros((1, 1), np.float32)))
            version = response.policy_version
            if version:
                assert response.action[0] == response.other[0] == version
            assert version >= last
            last = version
        return last

    async with policy_server(type=kind) as server, AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(acting(server.address, spec=spec(1, space)))
            for _ in range(4)
        ]
        host = server.service._hosts.default
        stats, load, waits = server.stats, host._runner.load, []
        used = stats.first_uses.used

        def note_load(*args: Any) -> None:
            waits.append(stats.batches)
            load(*args)

        def note_use(version: int, now_ns: int) -> float | None:
            waits[-1] = stats.batches - waits[-1]
            return used(version, now_ns)

        host._runner.load = note_load
        stats.first_uses.used = note_use
        learner = await stack.enter_async_context(PolicyClient(server.address))
        loops = [asyncio.ensure_future(act(client)) for client in clients]
        for version in range(1, 31):
            due = time.monotonic() + 0.05
            tensors = {name: torch.full_like(t, float(version)) for name, t in names.items()}
            await learner.publish_weights(version, dump_weights(tensors))
            await assert_eventually(lambda v=version: stats.first_uses.version >= v)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        done.set()
        assert await asyncio.gather(*loops) == [30] * 4
        assert stats.errors == 0
        assert len(waits) == 30
        assert max(waits) <= 2
