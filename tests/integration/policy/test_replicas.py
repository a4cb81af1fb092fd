"""Several policy servers with the same weights: sessions spread, move, and see no older weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from rlightning.errors import DeadlineExceededError, InvalidRequestError, UnavailableError
from rlightning.policy import PolicyClient, PolicyFleet, transfer
from rlightning.policy.replicas import Replicas
from rlightning.rpc.health import ServingStatus, check
from rlightning.rpc.replicas import Endpoint
from rlightning.services.policy_server.peers import catch_up
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.testing import FaultProxy, ServerProcess, assert_eventually, free_address
from rlightning.utils.config import PolicyServiceConfig, RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.wire import Writer, fill_value
from tests.integration.policy.harness import Policies, acting, env_ret, policy_server, spec, weights


@asynccontextmanager
async def two_servers(**policy: Any) -> AsyncIterator[tuple[Policies, Policies]]:
    async with policy_server(**policy) as one, policy_server(**policy) as other:
        yield one, other


def sessions(server: Policies) -> int:
    return server.service._registry.open_count


async def test_sessions_that_open_at_once_are_spread_and_later_ones_fill_up() -> None:
    async with two_servers() as (one, other), AsyncExitStack() as stack:
        addresses = [one.address, other.address]
        replicas = Replicas(addresses)
        stack.push_async_callback(replicas.close)
        clients = [PolicyClient(addresses, spec=spec(), replicas=replicas) for _ in range(6)]
        for client in clients:
            stack.push_async_callback(client.close)
        await asyncio.gather(*(client.start() for client in clients))
        assert (sessions(one), sessions(other)) == (3, 3)
        for client in clients:
            if client.address == other.address:
                await client.close()
        await assert_eventually(lambda: sessions(other) == 0)
        for _ in range(3):  # each with a choice of its own
            await stack.enter_async_context(acting(addresses))
        assert (sessions(one), sessions(other)) == (3, 3)


async def test_a_session_stays_after_a_cut_and_moves_when_its_server_drains() -> None:
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(policy_server()) for _ in range(2)]
        proxies = [
            await stack.enter_async_context(FaultProxy(server.address)) for server in (one, other)
        ]
        addresses = [proxy.address for proxy in proxies]
        client = await stack.enter_async_context(acting(addresses))
        await client.act(env_ret())
        at = addresses.index(client.address)
        proxies[at].cut()
        await client.act(env_ret())
        assert client.address == addresses[at]
        assert client._session is not None
        assert client._session.resumed
        stopping = asyncio.ensure_future((one, other)[at].server.stop(grace_s=5))
        for seq in range(3, 40):
            assert (await client.act(env_ret())).seq == seq
        await stopping
        await client.act(env_ret())
        assert client.address == addresses[1 - at]


async def test_a_session_that_opens_waits_for_servers_that_start() -> None:
    async with (
        policy_server() as one,
        policy_server(initial_weights="none", wait=False) as other,
        acting(one.address),
        PolicyClient(other.address) as learner,
    ):
        client = PolicyClient([one.address, other.address], spec=spec())
        opening = asyncio.ensure_future(client.start())
        await asyncio.sleep(0.1)
        assert not opening.done()
        await learner.publish_weights(1, weights())
        await opening
        assert client.address == other.address
        await client.close()


async def test_nobody_serves() -> None:
    addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    client = PolicyClient(addresses, spec=spec())
    with pytest.raises(UnavailableError, match=r"no replica serves: 127.0.0.1:1: .*127.0.0.1:2: "):
        await client.start(0.3)
    await client.close()
    async with PolicyFleet(addresses) as fleet:
        with pytest.raises(DeadlineExceededError, match=r"127.0.0.1:1,127.0.0.1:2: version 1 is"):
            await fleet.publish(1, weights(), timeout_s=0.3)
        with pytest.raises(UnavailableError, match="127.0.0.1:1: cannot connect"):
            await fleet.describe(timeout_s=0.1)


async def test_all_get_the_weights_and_one_that_is_away_holds_nobody_up() -> None:
    async with two_servers() as (one, other), FaultProxy(other.address) as proxy:
        addresses = [one.address, proxy.address]
        async with PolicyFleet(addresses, watch_s=0.1) as fleet:
            await fleet.publish(1, weights(seed=1))
            assert await versions(fleet) == [1, 1]
            found = await fleet.describe(timeout_s=5)
            assert len({one.stats["weights_sha256"] for one in found.values()}) == 1
            await proxy.refuse()
            proxy.cut()
            for version in (2, 3):
                await fleet.publish(version, weights(seed=version), timeout_s=10)
            assert await versions(fleet) == [3]
            await proxy.start()
            await assert_eventually(lambda: other.service._hosts.default.version == 3)
            with pytest.raises(InvalidRequestError, match="not a safetensors file"):
                await fleet.publish(4, b"garbage")


async def test_a_server_that_leaves_while_it_is_asked_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted: list[Any] = []
    server = await asyncio.start_server(lambda *streams: accepted.append(streams), "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    known = [Endpoint(address, address)]

    async def resolve(addresses: Any) -> list[Endpoint]:
        return known

    monkeypatch.setattr("rlightning.policy.fleet.resolve", resolve)
    async with PolicyFleet([address], watch_s=0.05) as fleet:
        asked = asyncio.create_task(fleet.describe(timeout_s=20))
        await assert_eventually(lambda: accepted)
        known = []
        with pytest.raises(UnavailableError, match="there is no policy server"):
            await asyncio.wait_for(asked, 10)
    for _, writer in accepted:
        writer.close()
    server.close()


async def versions(fleet: PolicyFleet) -> list[int]:
    return [one.policy_version for one in (await fleet.describe(timeout_s=1)).values()]


class Replica(ServerProcess):
    """One of several policy servers, on an address of its own."""

    def __init__(self, folder: Path, addresses: list[str], index: int) -> None:
        folder.mkdir()
        config = folder / "config.yaml"
        config.write_text(
            "policy: {device: cpu, initial_weights: random}\n"
            f"services: {{policy: {{addresses: [{', '.join(map(repr, addresses))}]}}}}\n"
        )
        command = ["-m", "rlightning.services.policy_server", "--config", str(config)]
        super().__init__([*command, "--listen", addresses[index]], folder)


@pytest.mark.crash
async def test_kill_9_of_a_replica_under_load_costs_no_answer_and_no_version(
    tmp_path: Path,
) -> None:
    """The killed one has no volume, and comes back after the learner has gone."""
    addresses = [free_address() for _ in range(2)]
    rpc = RpcConfig(heartbeat_s=0.2, lease_s=1)
    stop = asyncio.Event()

    async def act(client: PolicyClient) -> list[tuple[int, int]]:
        answers = []
        while not stop.is_set():
            response = await client.act(env_ret())
            answers.append((response.seq, response.policy_version))
            await asyncio.sleep(0.002)
        return answers

    with (
        Replica(tmp_path / "0", addresses, 0) as killed,
        Replica(tmp_path / "1", addresses, 1) as other,
    ):
        for address in addresses:
            await serving(address)
        async with AsyncExitStack() as stack:
            clients = [PolicyClient(addresses, spec=spec(), rpc=rpc) for _ in range(4)]
            for client in clients:
                stack.push_async_callback(client.close)
                await client.start(60)
            assert sorted(client.address for client in clients) == sorted([*addresses] * 2)
            loops = [asyncio.ensure_future(act(client)) for client in clients]
            async with PolicyFleet(addresses, watch_s=0.1) as fleet:
                for version in range(1, 6):
                    await fleet.publish(version, weights(seed=version))
                await asyncio.to_thread(killed.kill)
                for version in range(6, 9):
                    await fleet.publish(version, weights(seed=version))
            await assert_eventually(lambda: {c.address for c in clients} == {addresses[1]})
            await asyncio.to_thread(killed.start)
            await serving(addresses[0])
            async with PolicyClient(addresses[0]) as client:
                assert (await client.describe()).policy_version == 8
            await asyncio.to_thread(other.kill)
            await assert_eventually(lambda: {c.address for c in clients} == {addresses[0]})
            stop.set()
            for answers in await asyncio.gather(*loops):
                assert [seq for seq, _ in answers] == list(range(1, len(answers) + 1))
                found = [version for _, version in answers]
                assert found == sorted(found)
                assert found[-1] == 8


async def serving(address: str) -> None:
    """Waits until a server is SERVING."""

    async def is_serving() -> bool:
        try:
            return await check(address) is ServingStatus.SERVING
        except UnavailableError:
            return False

    await assert_eventually(is_serving, 60)


async def test_a_replica_that_lies_costs_no_more_than_weights_may_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = 0
    announced = 100

    async def describe(self: PolicyService, request: Any, context: Any) -> bytes:
        writer, response = Writer(), pb.PolicyServiceDescribeResponse(policy_version=7)
        fill_value(response.stats, {"policies": ["none"]}, writer)
        return writer.finish(response)

    async def pull(self: PolicyService, request: Any, context: Any) -> AsyncIterator[Message]:
        nonlocal sent
        header = pb.WeightsHeader(policy_version=7, total_bytes=announced)
        yield pb.PullWeightsResponse(header=header)
        for _ in range(100):
            sent += 1
            yield pb.PullWeightsResponse(chunk=bytes(2**20))
            await asyncio.sleep(0.01)

    monkeypatch.setattr(PolicyService, "_describe", describe)
    monkeypatch.setattr(PolicyService, "_pull_weights", pull)
    async with two_servers(named={"b": {}}, max_weights_bytes=2**20) as (one, other):
        hosts = one.service._hosts
        assert hosts is not None
        addresses = [one.address, other.address]
        await catch_up(hosts, PolicyServiceConfig(addresses=addresses, replicas=2))
        announced = 2**40
        await catch_up(hosts, PolicyServiceConfig(addresses=addresses, replicas=2))
        assert hosts.default.version == 0
    assert sent < 50
    assert "expected 100 bytes of weights, as announced" in caplog.text
    assert "weights of 1099511627776 bytes come; 1048576 are allowed" in caplog.text


async def test_a_replica_that_has_no_weights_as_announced_holds_a_start_up_for_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One sends nothing, one a few bytes at a time, and one older weights; then comes an honest one."""
    monkeypatch.setattr(transfer, "_TIMEOUT_S", 2.0)
    announced: dict[str, int] = {}
    described, honest = PolicyService._describe, PolicyService._pull_weights

    async def describe(self: PolicyService, request: Any, context: Any) -> bytes:
        data = await described(self, request, context)
        response = pb.PolicyServiceDescribeResponse.FromString(data)
        response.policy_version = announced[self._replicas.dial_address]
        return response.SerializeToString()

    async def pull(self: PolicyService, request: Any, context: Any) -> AsyncIterator[Message]:
        version = announced[self._replicas.dial_address]
        if version == 9:
            await asyncio.sleep(60)
        if version == 8:
            yield pb.PullWeightsResponse(header=pb.WeightsHeader(policy_version=8, total_bytes=99))
            while True:
                yield pb.PullWeightsResponse(chunk=b"x")
                await asyncio.sleep(0.05)
        async for response in honest(self, request, context):
            yield response

    monkeypatch.setattr(PolicyService, "_describe", describe)
    monkeypatch.setattr(PolicyService, "_pull_weights", pull)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(policy_server()) for _ in range(5)]
        for server, version in zip(servers, (9, 8, 7, 5, 0), strict=True):
            server.service._replicas = PolicyServiceConfig(address=server.address)
            announced[server.address] = version
        for server, version in zip(servers[2:4], (3, 5), strict=True):
            async with PolicyClient(server.address) as learner:
                await learner.publish_weights(version, weights(seed=version))
        hosts = servers[4].service._hosts
        assert hosts is not None
        addresses = [server.address for server in servers]
        began = time.monotonic()
        await catch_up(hosts, PolicyServiceConfig(addresses=addresses, replicas=5))
        assert time.monotonic() - began < 30
        assert hosts.default.version == 5
    refusals = [record.message for record in caplog.records if "is not used" in record.message]
    assert [one[:9] for one in refusals] == ["version 9", "version 8", "version 7"]
    assert "too slowly" in refusals[0]
    assert "too slowly" in refusals[1]
    assert "version 3 came" in refusals[2]


async def test_a_replica_that_counts_below_zero_is_not_chosen_and_connections_of_the_gone_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong: PolicyService | None = None
    honest = PolicyService._describe

    async def describe(self: PolicyService, request: Any, context: Any) -> bytes:
        data = await honest(self, request, context)
        response = pb.PolicyServiceDescribeResponse.FromString(data)
        if self is wrong:
            response.sessions = -5
        return response.SerializeToString()

    monkeypatch.setattr(PolicyService, "_describe", describe)
    async with two_servers() as (one, other):
        wrong = other.service
        replicas = Replicas([one.address, other.address])
        assert [(await replicas.choose(0)).address for _ in range(5)] == [one.address] * 5
        there = [Endpoint(one.address, "policy:1"), Endpoint(other.address, "policy:1")]
        known = there

        async def resolve(addresses: Any) -> list[Endpoint]:
            return known

        monkeypatch.setattr("rlightning.policy.replicas.resolve", resolve)
        await replicas.choose(0)
        assert set(replicas._channels) == set(there)
        known = there[:1]
        seat = replicas.seat()
        await seat.choose()
        seat.arrived()
        assert not replicas._channels.keys() - set(known)
        assert not replicas._coming
        await replicas.close()


async def test_a_server_that_leaves_while_it_is_asked_is_left_out() -> None:
    async with two_servers() as (one, other), FaultProxy(other.address) as proxy:
        async with PolicyFleet([one.address, proxy.address], watch_s=60) as fleet:
            assert len(await fleet.describe(timeout_s=10)) == 2
            proxy.delay_s = 30
            asking = asyncio.create_task(fleet.describe(timeout_s=60))
            await asyncio.sleep(0.3)  # under way
            fleet._addresses.remove(proxy.address)
            await fleet._look_up()
            assert set(await asyncio.wait_for(asking, 20)) == {one.address}
